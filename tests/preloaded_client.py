"""Has the server of `tests.preloaded` run a Python script, and lives as long as that process does.

Usage: `python -I -S preloaded_client.py ADDRESS SCRIPT ARGUMENTS`, where the script gets this process's standard input,
output and error. The module imports little, because tests start it instead of an interpreter with the heavy imports.
"""

import json
import os
import signal
import socket
import struct
import sys

_NUMBER = struct.Struct("q")


def main() -> None:
    """Send the request, wait for the end, and exit with the code of the process."""
    address, *arguments = sys.argv[1:]
    request = {"arguments": arguments, "cwd": os.getcwd(), "env": dict(os.environ), "start_new_session": True}
    content = json.dumps(request).encode()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect("\0" + address)
    socket.send_fds(connection, [_NUMBER.pack(len(content))], [0, 1, 2])
    connection.sendall(content)
    os.closerange(0, 2)  # the other end of a pipe must see that the process closes its own
    pid = _number(connection)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGTERM))  # what ends this process ends that one
    os._exit(_number(connection) & 255)


def _number(connection: socket.socket) -> int:
    content = b""
    while len(content) < _NUMBER.size:
        content += connection.recv(_NUMBER.size - len(content)) or _NUMBER.pack(1)
    return int(_NUMBER.unpack(content[: _NUMBER.size])[0])


if __name__ == "__main__":
    main()
