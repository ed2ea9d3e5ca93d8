r"""A program that compares mathematical answers with `math-verify`, in a process that can be killed.

SymPy can take minutes and gigabytes for a short answer such as `9^{9^{9^{9}}}`, within single operations that cannot be
interrupted in a thread. So answers are compared in a forked child, whose memory is limited and which the kernel kills
at its limit of CPU time. The parent stays ready to fork the next child, as importing SymPy takes a second.
`math_answer_as_judge` starts this program and communicates with it.

The argument is the path of a Unix socket that the program makes. It writes `ready` to stdout once it listens. Each
connection has a child of its own, which ends with it. A line that it receives is a JSON object, `{"gold": [TEXT, …],
"answer": [TEXT, …]}`, with the forms of each answer to try to parse, best first. The child answers with the line
`begin`, then `same` or `different`, and `died` if the comparison has ended it. The program ends with its standard
input.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

CPU_SECONDS = 2.0
MEMORY_BYTES = 2 << 30


def main() -> None:
    """Serve until standard input ends."""
    ready = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the output of libraries
    logging.disable()
    with suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    is_same([r"\boxed{\frac{1}{2}}"], ["the answer is 0.5"])  # build the parser's tables before the first fork
    folder, name = os.path.split(sys.argv[1])
    os.chdir(folder)  # the path of a socket has at most 107 bytes
    with suppress(FileNotFoundError):
        os.unlink(name)  # that of a server which was killed
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(name)
    listener.listen(socket.SOMAXCONN)
    wakeup, wakeup_end = os.pipe()
    os.set_blocking(wakeup_end, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wakeup_end, warn_on_full_buffer=False)
    os.write(ready, b"ready\n")
    os.close(ready)
    connections: dict[int, socket.socket] = {}  # by child
    while True:
        readable, _, _ = select.select([listener.fileno(), wakeup, 0], [], [])
        if 0 in readable:
            return
        if wakeup in readable:
            os.read(wakeup, 4096)
            _report_ended(connections)
        if listener.fileno() in readable:
            connection, _ = listener.accept()
            if (child := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                listener.close()
                for other in connections.values():  # whose clients would wait for this child
                    other.close()
                os.close(0)
                _answer(connection)
                os._exit(0)
            connections[child] = connection


def _report_ended(connections: dict[int, socket.socket]) -> None:
    """Close the connections of the children that have ended, and report those that have died of a comparison."""
    while connections and (ended := os.waitpid(-1, os.WNOHANG))[0]:
        connection, code = connections.pop(ended[0]), os.waitstatus_to_exitcode(ended[1])
        if code not in (0, -signal.SIGTERM):  # SIGTERM ends this program, too: the client tries it again elsewhere
            with suppress(OSError):
                connection.sendall(b"died\n")
        connection.close()


def _answer(connection: socket.socket) -> None:
    for line in connection.makefile("rb"):
        request = json.loads(line)
        connection.sendall(b"begin\n")
        # The signal has no handler, so it ends the process even within a long operation.
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        same = is_same(request["gold"], request["answer"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.sendall(b"same\n" if same else b"different\n")


def is_same(gold: Sequence[str], answer: Sequence[str]) -> bool:
    """Return whether math-verify considers the answers equal; of each, the first form that parses is used."""
    from math_verify import verify

    return bool(verify(_parsed(gold), _parsed(answer), timeout_seconds=None))


def _parsed(readings: Sequence[str]) -> list[Any]:
    from math_verify import parse

    parsed: list[Any] = []
    for reading in readings:
        parsed = parse(reading, parsing_timeout=None)
        if any(not isinstance(part, str) for part in parsed):
            break
    return parsed


if __name__ == "__main__":
    main()
