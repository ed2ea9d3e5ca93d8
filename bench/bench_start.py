"""Measure the time from process start to the first reward of a training run on a backbone.

Each run is `astuner --conf` in a new process: one step of 2 tasks × 2 episodes of 16 tokens with a random model of 1 M
parameters. A first, uncounted run warms the file cache of the operating system. The processor time is that of all
processes of the run until then, in user and in system mode. It hardly depends on what else the machine does.

Run it with the interpreter of the backbone's environment. `--against FOLDER` alternates the runs with those of another
checkout of astuner.

Prints one line of JSON per checkout. `phases` are the medians of the times, in seconds since the start, at which the
main process has checked the run and starts Ray (`checked`), Ray starts its first worker (`ray`), the first episode
starts (`first_episode`) and ends (`first_reward`). `--processes` adds the processes of the last run: the second of
their start, their processor time and the most memory that they had of their own, in MB.

    python bench/bench_start.py --backbone verl [--runs 5] [--against FOLDER] [--processes]
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
from step_astuner import configuration
from step_task import Sizes, prepare

from astuner.run_record import read_episode, read_index
from astuner.system.process_tree import end_processes

ROOT = Path(__file__).resolve().parents[1]
SIZES = Sizes(prompts=2, group=2, tokens=16, steps=1)
_SAMPLE_SECONDS = 0.2
_PR_SET_CHILD_SUBREAPER = 36
_WORKER_PROGRAMS = ("default_worker.py", "setup_worker.py", "worker_client.py")


@dataclass
class SeenProcess:
    """A process of the run.

    Attributes:
        start: seconds from the start of the run.
        name: the end of its command line, or the name that Ray gives it.
        cpu_seconds: processor time with that of its ended children.
        own_mb: the most memory that it had and did not share.
    """

    start: float
    name: str = ""
    cpu_seconds: float = 0.0
    own_mb: float = 0.0


@dataclass
class Run:
    """The measurements of a run."""

    seconds: dict[str, float] = field(default_factory=dict)
    cpu_seconds: float = 0.0
    processes: list[SeenProcess] = field(default_factory=list)


class ProcessTree:
    """The descendants of this process, including those whose parents have ended."""

    def __init__(self, start: float, *, with_memory: bool) -> None:
        self._start = start
        self._with_memory = with_memory
        self._seen: dict[psutil.Process, SeenProcess] = {}
        self._totals: list[tuple[float, float]] = []
        self._reaped = self._cpu_of_reaped()

    def sample(self) -> None:
        """Read the processor time of all processes."""
        total = self._cpu_of_reaped() - self._reaped
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                seen = self._seen.setdefault(process, SeenProcess(round(process.create_time() - self._start, 2)))
                times = process.cpu_times()
                seen.name = _name(process) or seen.name
                seen.cpu_seconds = times.user + times.system
                if self._with_memory:
                    seen.own_mb = max(seen.own_mb, process.memory_full_info().uss / 1e6)
                total += seen.cpu_seconds + times.children_user + times.children_system
        self._totals.append((time.time(), total))

    def cpu_seconds(self, until: float) -> float:
        """Return the processor time of all processes until a time, in seconds since the epoch."""
        return next((total for moment, total in self._totals if moment >= until), self._totals[-1][1])

    @property
    def processes(self) -> list[SeenProcess]:
        """All processes, in the order of their start."""
        return sorted(self._seen.values(), key=lambda process: process.start)

    @staticmethod
    def _cpu_of_reaped() -> float:
        times = os.times()
        return times.children_user + times.children_system


def _name(process: psutil.Process) -> str:
    words = [word for word in process.cmdline() if word]
    if words and words[0].startswith("ray::"):
        return words[0]
    programs = [Path(word).name for word in words if word.endswith(".py")]
    modules = [words[place + 1] for place, word in enumerate(words[:-1]) if word == "-m"]
    return (programs or modules or [Path(words[0]).name if words else ""])[0]


def measure(backbone: str, checkout: Path, *, with_memory: bool = False) -> Run:
    """Run the job once. To read the memory of its processes takes processor time."""
    with tempfile.TemporaryDirectory(prefix="bench_start_") as name:
        folder = Path(name)
        prepare(folder, SIZES)
        conf = configuration(folder, SIZES)
        command = [sys.executable, "-m", "astuner", "--conf", str(conf), "--backbone", backbone, "--exp-dir", "records"]
        path = os.pathsep.join((str(checkout), str(ROOT / "bench")))
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
        start = time.time()
        tree = ProcessTree(start, with_memory=with_memory)
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)
            while process.poll() is None:
                tree.sample()
                time.sleep(_SAMPLE_SECONDS)
        _end_remaining()
        if process.returncode:
            raise SystemExit(f"the run exited with {process.returncode}:\n{(folder / 'output').read_text()[-3000:]}")
        (record,) = (folder / "records").glob("*/summary.json")
        return _measured(record.parent, start, tree)


def _measured(record: Path, start: float, tree: ProcessTree) -> Run:
    episodes = [read_episode(record / entry.path) for entry in read_index(record)]
    first_reward = min(episode.end_time for episode in episodes if episode.reward is not None)
    seconds = {"checked": _log_time(record / "run.log", "starting Ray") - start}
    workers = [process.start for process in tree.processes if process.name.startswith(("ray::", *_WORKER_PROGRAMS))]
    seconds["ray"] = min(workers)
    seconds["first_episode"] = min(episode.start_time for episode in episodes) - start
    seconds["first_reward"] = first_reward - start
    return Run(seconds, tree.cpu_seconds(first_reward), tree.processes)


def _log_time(log: Path, text: str) -> float:
    """Return the time of the first line of a run's log that contains a text."""
    line = next(line for line in log.read_text().splitlines() if text in line)
    return datetime.fromisoformat(line.partition(" |")[0]).timestamp()


def _end_remaining() -> None:
    """Wait for the processes that end shortly after the run, and reap them."""

    def remaining() -> set[psutil.Process]:
        return set(psutil.Process().children(recursive=True))

    until = time.monotonic() + 20.0
    while remaining() and time.monotonic() < until:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(_SAMPLE_SECONDS)
    end_processes(remaining, 2.0)


def report(checkout: Path, backbone: str, runs: list[Run], *, with_processes: bool) -> dict[str, Any]:
    """Return the line of a checkout."""
    first_rewards = [run.seconds["first_reward"] for run in runs]
    result: dict[str, Any] = {
        "backbone": backbone,
        "checkout": str(checkout),
        "runs": len(runs),
        "cores": len(os.sched_getaffinity(0)),
        "first_reward_seconds": round(statistics.median(first_rewards), 2),
        "each": [round(seconds, 2) for seconds in first_rewards],
        "cpu_seconds": round(statistics.median(run.cpu_seconds for run in runs), 2),
        "each_cpu": [round(run.cpu_seconds, 2) for run in runs],
        "phases": {name: round(statistics.median(run.seconds[name] for run in runs), 2) for name in runs[0].seconds},
    }
    if with_processes:
        shown = [process for process in runs[-1].processes if process.cpu_seconds >= 0.1]
        result["processes"] = [
            [process.name, process.start, round(process.cpu_seconds, 2), round(process.own_mb)] for process in shown
        ]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", choices=("local", "trinity", "verl"), required=True)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--processes", action="store_true")
    arguments = parser.parse_args()
    # Processes whose parents have ended become children of this one, so that their time is counted.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    checkouts = [ROOT, *([arguments.against.resolve()] if arguments.against else [])]
    runs: dict[Path, list[Run]] = {checkout: [] for checkout in checkouts}
    measure(arguments.backbone, ROOT)
    for _ in range(arguments.runs):
        for checkout in checkouts:
            runs[checkout].append(measure(arguments.backbone, checkout, with_memory=arguments.processes))
            print(f"{checkout}: {runs[checkout][-1].seconds}, {runs[checkout][-1].cpu_seconds:.1f} s", file=sys.stderr)
    for checkout, measured in runs.items():
        print(json.dumps(report(checkout, arguments.backbone, measured, with_processes=arguments.processes)))


if __name__ == "__main__":
    main()
