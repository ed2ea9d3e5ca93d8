"""Has the server of `tests.preloaded` run a Python script, and lives as long as that process does.

Usage: `python -I -S preloaded_client.py ADDRESS SCRIPT ARGUMENTS`, where the script gets this process's standard input,
output and error. The module imports little, because tests start it instead of an interpreter with the heavy imports.
"""

import json
import os
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
    numbers = b""
    while len(numbers) < 2 * _NUMBER.size:  # its process id, and its exit code
        numbers += connection.recv(2 * _NUMBER.size) or _NUMBER.pack(1)
    _, code = struct.unpack("2q", numbers)
    os._exit(code & 255)


if __name__ == "__main__":
    main()
