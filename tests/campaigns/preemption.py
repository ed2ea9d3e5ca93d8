"""Preempt runs with SIGTERM in each of eight phases, start them again, and compare their records.

A scheduler that takes a machine away sends SIGTERM. Then a run saves its last complete step and exits with 143, and
the same command resumes it. For each phase, the campaign starts a run, sends the signal in the middle of the phase, and
lets the run end in a second process. Its record is compared with that of an uninterrupted run. On verl and trinity,
sampled tokens may differ between runs, so only missing and doubled rows count there. Prints one line of JSON per phase
and one at the end, and exits with 1 if there is a fault.

    python -m tests.campaigns.preemption [--backbone local] [--keep FOLDER]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil

from astuner.process_tree import environment_variable
from tests.campaigns.kill_campaign import create_model
from tests.campaigns.serial_run import compare, write_job

PHASES = {
    "reading the tasks": ("read_tasks", 1),
    "loading the model": ("load_model", 1),
    "the first validation": ("validation", 1),
    "a rollout": ("rollout", 2),
    "an update": ("update", 2),
    "a hand-over of weights": ("sync_weights", 2),
    "saving a checkpoint": ("save_checkpoint", 1),
    "the last validation": ("validation", 5),
}
"""The astuner's phase, and which of its blocks, by the name in the report."""
_INSIDE = "--inside"
_MARK = "PREEMPTION_MARK"
_BLOCK = "finished block:"
_PATIENCE = 600.0


def run_astuner(phase: str, number: int, delay: float, arguments: list[str]) -> None:
    """Run the command `astuner` in this process, and send it SIGTERM in a phase.

    Args:
        phase: the phase; "" for no signal.
        number: which block of the phase, from 1.
        delay: seconds from the start of the block to the signal.
        arguments: those of the command.
    """
    from astuner.backbone import base
    from astuner.cli import main as command
    from astuner.launcher import launch

    blocks: Counter[str] = Counter()
    original = base.warn_if_slow

    @contextlib.contextmanager
    def observed(name: Any, *more: Any) -> Iterator[None]:
        blocks[name] += 1
        block, started = blocks[name], time.monotonic()
        if (name, block) == (phase, number):
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with original(name, *more):
            yield
        print(_BLOCK, name, block, time.monotonic() - started, flush=True)

    base.warn_if_slow = launch.warn_if_slow = observed  # type: ignore[assignment]
    sys.argv = ["astuner", *arguments]
    command()


class PreemptedRun:
    """The processes of one run, and what they printed."""

    def __init__(self, yaml: Path, folder: Path) -> None:
        self.record = folder / "run"
        self._command = ["--conf", str(yaml), "--exp-dir", str(folder)]
        self._folder, self._mark = folder, uuid4().hex
        folder.mkdir()

    def execute(self, phase: str = "", number: int = 0, delay: float = 0.0) -> tuple[int, str]:
        """Start the run, wait for its end, and return the exit code and the output."""
        module = [sys.executable, "-m", "tests.campaigns.preemption", _INSIDE, phase, str(number), str(delay)]
        path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
        process = subprocess.run(
            [*module, *self._command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self._folder,
            env=os.environ | {_MARK: self._mark, "PYTHONPATH": path},
            timeout=_PATIENCE,
            check=False,
        )
        return process.returncode, process.stdout

    def leftovers(self) -> int:
        """Return the number of processes of the run that still exist after some seconds."""
        until = time.monotonic() + 60.0
        while (count := sum(map(self._is_mine, psutil.process_iter()))) and time.monotonic() < until:
            time.sleep(0.5)
        return count

    def _is_mine(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            return environment_variable(process, _MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE
        return False


def preempt(yaml: Path, folder: Path, whole: Path, phase: str, number: int, delay: float) -> dict[str, Any]:
    """Preempt a run, let it end, and return the facts of the report."""
    run = PreemptedRun(yaml, folder)
    code, printed = run.execute(phase, number, delay)
    leftovers = run.leftovers()
    resumed_code, resumed = run.execute()
    step = re.search(r"resuming from the checkpoint of step (\d+)", resumed)
    (folder / "output.log").write_text(printed + resumed)
    facts: dict[str, Any] = {
        "exit_code": code,
        "leftover_processes": leftovers,
        "second_exit_code": resumed_code,
        "resumed_from": int(step[1]) if step else None,
    }
    if resumed_code == 0:
        comparison = compare(whole, run.record)
        names = ("lost", "extra", "doubled", "different", "leftovers")
        facts |= {name: len(getattr(comparison, name)) for name in names}
    return facts


def is_faulty(facts: dict[str, Any], *, is_exact: bool) -> bool:
    """Return whether a run did not exit with 143, did not end, left something, or lost or doubled a row."""
    names = ("leftover_processes", "second_exit_code", "lost", "extra", "doubled", "leftovers")
    names += ("different",) if is_exact else ()
    return facts["exit_code"] != 143 or any(facts.get(name) for name in names)


def main() -> None:
    """Run the campaign."""
    if sys.argv[1:2] == [_INSIDE]:
        run_astuner(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), sys.argv[5:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", choices=("local", "verl", "trinity"), default="local")
    parser.add_argument("--keep", type=Path, help="folder for the records, which are removed without it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.keep or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        yaml = write_job(folder, create_model(folder), backbone=options.backbone)
        whole = PreemptedRun(yaml, folder / "whole")
        code, printed = whole.execute()
        if code != 0:
            sys.exit(f"the uninterrupted run ended with {code}:\n{printed}")
        blocks = re.findall(rf"{_BLOCK} (\w+) (\d+) (\S+)", printed)
        seconds = {(name, int(number)): float(duration) for name, number, duration in blocks}
        faults = []
        for title, (phase, number) in PHASES.items():
            delay = seconds[phase, number] / 2
            facts = preempt(yaml, folder / title.replace(" ", "_"), whole.record, phase, number, delay)
            print(json.dumps({"backbone": options.backbone, "phase": title, **facts}), flush=True)
            faults += [title] if is_faulty(facts, is_exact=options.backbone == "local") else []
    print(json.dumps({"backbone": options.backbone, "phases": len(PHASES), "faults": faults}))
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
