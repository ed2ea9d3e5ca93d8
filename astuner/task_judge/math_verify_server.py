r"""A program that compares mathematical answers with `math-verify`, in a process that may be killed.

SymPy works for minutes and takes gigabytes over a short answer such as `9^{9^{9^{9}}}`, within single operations
that no thread can be stopped in. So answers are compared in a child process with a limit on its CPU time, at
whose end the kernel kills it, and on its memory. `math_verify_process` starts this program and talks to it.

It reads one JSON object a line, `{"number": N, "gold": [TEXT, …], "answer": [TEXT, …]}`: readings of either, best
first. It writes `ready` once; then, for each request, `begin N`, and `same N` or `different N`; `died CODE` when
the child did. A child that is killed from outside may take a request with it, or leave it to the next child.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

CPU_SECONDS = 2.0
MEMORY_BYTES = 2 << 30


def main() -> None:
    """Serve until standard input ends."""
    replies = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nothing that a library prints may pass for a reply
    logging.disable()
    with suppress(ValueError, OSError):  # macOS knows no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    is_same([r"\boxed{\frac{1}{2}}"], ["the answer is 0.5"])  # the parser's tables are made before the first fork
    os.write(replies, b"ready\n")
    while True:
        child = os.fork()
        if child == 0:
            _serve(replies)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == 0:
            return
        os.write(replies, f"died {code}\n".encode())


def _serve(replies: int) -> None:
    for line in iter(sys.stdin.buffer.readline, b""):
        request = json.loads(line)
        os.write(replies, f"begin {request['number']}\n".encode())
        # Without a handler of its own, the signal ends the process even in the middle of one long operation.
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        same = is_same(request["gold"], request["answer"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(replies, f"{'same' if same else 'different'} {request['number']}\n".encode())


def is_same(gold: Sequence[str], answer: Sequence[str]) -> bool:
    """Whether math-verify holds the two to be equal, each in its first reading that is mathematics."""
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
