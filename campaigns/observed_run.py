"""Runs of `astuner` whose phases a campaign observes."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from uuid import uuid4

import psutil

from astuner.system.process_tree import environment_variable
from campaigns import observed_astuner

_MARK = "ASTUNER_OBSERVED_RUN"
_PATIENCE = 600.0
_LEFTOVER_SECONDS = 60.0


class ObservedRun:
    """The processes of one run, and what they print.

    Attributes:
        record: the folder of its record.
        log: the file with the output of all processes so far.
    """

    def __init__(self, yaml: Path, folder: Path, python: str = sys.executable, **environment: str) -> None:
        """Make a folder for it.

        Args:
            yaml: the configuration, with `experiment_name: run`.
            folder: the folder, which does not exist.
            python: the interpreter, which has astuner's dependencies and those of the backbone.
            environment: further environment variables.
        """
        self.record, self.log = folder / "run", folder / "output.log"
        self._words = ["--conf", str(yaml), "--exp-dir", str(folder)]
        self._folder, self._mark, self._python = folder, uuid4().hex, python
        self._environment: Mapping[str, str] = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._offset = 0
        folder.mkdir()

    def start(self, phase: str = "", number: int = 0, delay: float = 0.0) -> None:
        """Start a process, which sends itself SIGTERM in a phase if one is given (see `observed_astuner`)."""
        script = [self._python, observed_astuner.__file__, phase, str(number), str(delay)]
        path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {_MARK: self._mark, "PYTHONPATH": path} | self._environment
        with self.log.open("ab") as log:
            self._offset = log.tell()
            self._process = subprocess.Popen(
                [*script, *self._words], stdout=log, stderr=subprocess.STDOUT, cwd=self._folder, env=environment
            )

    def printed(self) -> str:
        """Return the output of the latest process so far."""
        return self.log.read_bytes()[self._offset :].decode(errors="replace")

    def wait_until_block(self, phase: str, number: int) -> None:
        """Wait for the start of a block of a phase.

        Raises:
            RuntimeError: the process has ended, or the block has not started in time.
        """
        assert self._process is not None
        until = time.monotonic() + _PATIENCE
        while f"started block: {phase} {number}\n" not in self.printed():
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{phase} {number} has not started; see {self.log}")
            time.sleep(0.02)

    def end(self, timeout: float = _PATIENCE) -> int:
        """Wait for the end of the latest process and return its exit code.

        Raises:
            subprocess.TimeoutExpired: it was still running after `timeout` seconds; it is killed.
        """
        assert self._process is not None
        try:
            return self._process.wait(timeout)
        finally:
            self._process.kill()
            self._process.wait()

    def execute(self, phase: str = "", number: int = 0, delay: float = 0.0) -> tuple[int, str]:
        """Start a process, wait for its end, and return its exit code and its output."""
        self.start(phase, number, delay)
        return self.end(), self.printed()

    def resumed_from(self) -> int | None:
        """Return the step of the checkpoint that the latest process has resumed from; None if it has not."""
        step = re.search(r"resuming from the checkpoint of step (\d+)", self.printed())
        return int(step[1]) if step else None

    def durations(self) -> dict[tuple[str, int], float]:
        """Return the seconds of each finished block of the latest process, by phase and number."""
        blocks = re.findall(r"finished block: (\w+) (\d+) (\S+)", self.printed())
        return {(name, int(number)): float(seconds) for name, number, seconds in blocks}

    def leftovers(self) -> int:
        """Return the number of processes of the run that still exist after some seconds."""
        until = time.monotonic() + _LEFTOVER_SECONDS
        while (count := sum(map(self._is_mine, psutil.process_iter()))) and time.monotonic() < until:
            time.sleep(0.5)
        return count

    def _is_mine(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            return environment_variable(process, _MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE
        return False
