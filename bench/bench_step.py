"""Compare the step time and the time to the first reward of astuner's local backbone with TRL's `GRPOTrainer`.

Both train the same random Qwen3-shaped model of 1 M parameters on the same prompts, with the same group size,
completion length, reward function and optimizer, in float32 and without KL. Each framework runs in its own process with
its default number of threads, and their steps alternate. Several rounds with new processes repeat this, so there are
also several measurements of the time to the first reward (from the start of the process, imports included).

Prints one line of JSON: medians over all rounds, in seconds, and peak resident memory in MiB (2^20 bytes).

    pip install -e ".[bench]"
    python bench/bench_step.py [--prompts 8] [--group 8] [--tokens 64] [--rounds 3] [--steps 5] [--warm-up 2]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from step_task import Sizes

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
# Pause between two steps, so that the OpenMP threads of the last active process have gone to sleep.
PAUSE_SECONDS = 0.1


@dataclass
class Measurements:
    """Measurements of one framework over all rounds."""

    steps: list[float] = field(default_factory=list)
    first_rewards: list[float] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)

    def report(self) -> dict[str, float]:
        return {
            "median_step_seconds": round(statistics.median(self.steps), 4),
            "first_reward_seconds": round(statistics.median(self.first_rewards), 3),
            "peak_memory_mb": round(statistics.median(self.peaks), 1),
        }


class FrameworkProcess:
    """The process of one framework.

    Args:
        name: `astuner` or `trl`.
        folder: The folder with the model and the sizes.
        python: The interpreter.

    Attributes:
        process: The process.
    """

    def __init__(self, name: str, folder: Path, python: str = sys.executable) -> None:
        self._name = name
        self._log = (folder / f"{name}.log").open("w+")
        self._started = time.time()
        self.process = subprocess.Popen(
            [python, str(FOLDER / f"step_{name}.py"), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment(),
            cwd=folder,
        )

    def ready(self) -> None:
        """Wait until the process is between two steps."""
        line = self._line()
        if line != "ready\n":
            self._fail(f"printed {line!r}, expected 'ready'")

    def resume(self) -> None:
        """Let the process continue."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def step(self) -> float:
        """Let the process run one step. Return its duration in seconds."""
        start = time.perf_counter()
        self.resume()
        self.ready()
        return time.perf_counter() - start

    def finish(self) -> tuple[dict[str, Any], float]:
        """Let the process end. Return its results and its peak memory in MiB."""
        self.resume()
        result = json.loads(self._line())
        result["first_reward_seconds"] = result["first_reward_at"] - self._started
        _, status, usage = os.wait4(self.process.pid, 0)
        self.process.returncode = os.waitstatus_to_exitcode(status)
        if self.process.returncode:
            self._fail(f"exited with {self.process.returncode}")
        return result, usage.ru_maxrss / 1024

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline() or self._fail("has ended")

    def _fail(self, problem: str) -> Any:
        self._log.seek(0)
        tail = "".join(self._log.readlines()[-30:])
        self.process.kill()
        raise SystemExit(f"the process of {self._name} {problem}:\n{tail}")


def environment() -> dict[str, str]:
    """Return the environment of the child processes: no network, and the modules of this checkout first."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


def one_round(order: tuple[str, ...], sizes: Sizes, warm_up: int, measurements: dict[str, Measurements]) -> None:
    """Start both frameworks, one after the other, then alternate their steps."""
    with tempfile.TemporaryDirectory(prefix="bench_step_") as name:
        folder = Path(name)
        prepare(folder, sizes)
        processes: dict[str, FrameworkProcess] = {}
        for framework in order:
            process = processes[framework] = FrameworkProcess(framework, folder)
            process.ready()
            # The first reward of a framework is measured while the other one is idle.
            process.step()
        for number in range(2, sizes.steps + 1):
            for framework in order:
                time.sleep(PAUSE_SECONDS)
                seconds = processes[framework].step()
                print(f"{framework} step {number}: {seconds:.3f} s", file=sys.stderr)
                if number > warm_up:
                    measurements[framework].steps.append(seconds)
        counts = []
        for framework, process in processes.items():
            result, peak = process.finish()
            measurements[framework].first_rewards.append(result.pop("first_reward_seconds"))
            measurements[framework].peaks.append(peak)
            counts.append((result["tokens"], result["completion_tokens"]))
    expected = sizes.steps * sizes.prompts * sizes.group * sizes.tokens
    if counts[0] != counts[1] or counts[0][1] != expected:
        raise SystemExit(
            f"expected both frameworks to sample {expected} tokens from the same prompts, got (all, sampled): {counts}"
        )


def prepare(folder: Path, sizes: Sizes) -> None:
    """Create the model in a separate process, because the peak memory of a child starts at that of its parent."""
    numbers = [str(number) for number in (sizes.prompts, sizes.group, sizes.tokens, sizes.steps)]
    command = [sys.executable, str(FOLDER / "step_task.py"), str(folder), *numbers]
    subprocess.run(command, check=True, stdout=sys.stderr, env=environment())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="timed steps per round")
    parser.add_argument("--warm-up", type=int, default=2, help="untimed steps before them")
    args = parser.parse_args()
    sizes = Sizes(args.prompts, args.group, args.tokens, args.warm_up + args.steps)
    measurements = {"trl": Measurements(), "astuner": Measurements()}
    for number in range(args.rounds):
        order = tuple(measurements) if number % 2 == 0 else tuple(reversed(measurements))
        one_round(order, sizes, args.warm_up, measurements)
    result: dict[str, Any] = {name: measured.report() for name, measured in measurements.items()}
    ratio = statistics.median(measurements["astuner"].steps) / statistics.median(measurements["trl"].steps)
    print(json.dumps(result | {"step_ratio": round(ratio, 4)}))


if __name__ == "__main__":
    main()
