"""The command `astuner` in a process that prints when its phases start and end, and sends itself SIGTERM in one.

The file is run by its path, because `tests` is a package of a library in the environments of the backbones:

    python observed_astuner.py PHASE NUMBER DELAY ARGUMENTS_OF_ASTUNER...

PHASE is one of astuner's phases, NUMBER says which of its blocks, from 1, and DELAY is the number of seconds from the
start of the block to the signal. If the block ends earlier, the signal is sent at its end. With an empty PHASE, there
is no signal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any


def main(phase: str, number: int, delay: float, arguments: list[str]) -> None:
    """Run the command in this process."""
    from astuner.backbone import base
    from astuner.cli.main import main as command
    from astuner.launcher import launch

    blocks: Counter[str] = Counter()
    original = base.warn_if_slow

    @contextlib.contextmanager
    def observed(name: Any, *more: Any) -> Iterator[None]:
        blocks[name] += 1
        block, started = blocks[name], time.monotonic()
        print("started block:", name, block, flush=True)
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGTERM))
        is_chosen = (name, block) == (phase, number)
        if is_chosen:
            timer.start()
        with original(name, *more):
            yield
            if is_chosen:
                timer.cancel()
                signal.raise_signal(signal.SIGTERM)
        print("finished block:", name, block, time.monotonic() - started, flush=True)

    base.warn_if_slow = launch.warn_if_slow = observed  # type: ignore[assignment]
    sys.argv = ["astuner", *arguments]
    command()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
