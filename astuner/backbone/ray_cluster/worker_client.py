"""The program that Ray starts for each worker if a `WorkerServer` runs: it has the server fork the worker.

Ray runs `python -I -S worker_client.py SOCKET default_worker.py ...` (`runtime_env`'s `py_executable`), so this module
imports nothing but a few modules of the standard library. It lives as long as the worker, because Ray observes the
process that it has started.
"""

import json
import os
import socket
import sys


def main() -> None:
    """Ask the server for a worker with this process's arguments, environment and output, and wait for its end.

    If the server has ended, or could not import its modules, this process becomes an ordinary worker.
    """
    path, *arguments = sys.argv[1:]
    request = json.dumps({"argv": arguments, "env": dict(os.environ), "cwd": os.getcwd()}).encode()
    try:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        socket.send_fds(connection, [len(request).to_bytes(4, "big")], [0, 1, 2])
        connection.sendall(request)
        is_forked = connection.recv(1) == b"f"
    except OSError:
        is_forked = False
    if not is_forked:
        os.execv(sys.executable, [sys.executable, *arguments])
    code = connection.recv(1)  # empty if the server was killed
    os._exit(code[0] if code else 1)


if __name__ == "__main__":
    main()
