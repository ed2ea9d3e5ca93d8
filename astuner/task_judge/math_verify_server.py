r"""A program that compares mathematical answers with `math-verify`, in a process that can be killed.

SymPy can take minutes and gigabytes for a short answer such as `9^{9^{9^{9}}}`, within single operations that cannot be
interrupted in a thread. So answers are compared in a forked child, whose memory is limited and which the kernel kills
at its limit of CPU time. The parent stays ready to fork the next child, as importing SymPy takes a second.
`math_answer_as_judge` starts this program and communicates with it.

Each input line is a JSON object, `{"number": N, "gold": [TEXT, …], "answer": [TEXT, …]}`, with the forms of each answer
to try to parse, best first. The program writes `ready` once. For each request it writes `begin N`, then `same N` or
`different N`, or `died CODE` if the child died. If a child is killed from outside, the request may be lost or be read
by the next child.
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
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # output of libraries must not appear among the replies
    logging.disable()
    with suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    is_same([r"\boxed{\frac{1}{2}}"], ["the answer is 0.5"])  # build the parser's tables before the first fork
    os.write(replies, b"ready\n")
    while True:
        child = os.fork()
        if child == 0:
            for line in iter(sys.stdin.buffer.readline, b""):
                request = json.loads(line)
                os.write(replies, f"begin {request['number']}\n".encode())
                # The signal has no handler, so it ends the process even within a long operation.
                signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
                same = is_same(request["gold"], request["answer"])
                signal.setitimer(signal.ITIMER_PROF, 0)
                os.write(replies, f"{'same' if same else 'different'} {request['number']}\n".encode())
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == 0:
            return
        os.write(replies, f"died {code}\n".encode())


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
