"""A training step of astuner's local backbone beside one of TRL's `GRPOTrainer`, and the time to the first reward.

Both tune the same random Qwen3-shaped model of 1 M parameters on the same prompts, with groups of the same size,
completions of the same length, the same reward function and optimiser, in float32 and without KL. Each runs in a
process of its own, with the threads that it comes with by default; their steps alternate. That is repeated in
several rounds with fresh processes, which also gives several times to the first reward (from the start of the
process, imports and all). The last round's peak memory is the largest that any round had.

Prints one line of JSON: medians over all rounds, in seconds, and resident memory in MiB (2^20 bytes).

    pip install -e ".[bench]"
    python tests/bench/bench_step.py [--prompts 8] [--group 8] [--tokens 64] [--rounds 3] [--steps 5] [--warm-up 2]
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

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# Between two steps, so that the OpenMP threads of the process that was last at work have gone to sleep.
PAUSE_SECONDS = 0.1


@dataclass
class Measured:
    """What was seen of one framework, over all rounds."""

    steps: list[float] = field(default_factory=list)
    first_rewards: list[float] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)

    def report(self) -> dict[str, float]:
        return {
            "median_step_seconds": round(statistics.median(self.steps), 4),
            "first_reward_seconds": round(statistics.median(self.first_rewards), 3),
            "peak_memory_mb": round(statistics.median(self.peaks), 1),
        }


class Side:
    """One framework's process."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name = name
        self._log = (folder / f"{name}.log").open("w+")
        self._started = time.time()
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / f"step_{name}.py"), str(folder)],
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
            self._fail(f"said {line!r} where 'ready' was expected")

    def go(self) -> None:
        """Let it go on."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def step(self) -> float:
        """Let it do one step; return the seconds that this took."""
        began = time.perf_counter()
        self.go()
        self.ready()
        return time.perf_counter() - began

    def finish(self) -> tuple[dict[str, Any], float]:
        """Let it end; return what it counted and its peak memory in MiB."""
        self.go()
        result = json.loads(self._line())
        result["first_reward_seconds"] = result["first_reward_at"] - self._started
        _, status, usage = os.wait4(self._process.pid, 0)
        self._process.returncode = os.waitstatus_to_exitcode(status)
        if self._process.returncode:
            self._fail(f"exited with {self._process.returncode}")
        return result, usage.ru_maxrss / 1024

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline() or self._fail("has ended")

    def _fail(self, what: str) -> Any:
        self._log.seek(0)
        tail = "".join(self._log.readlines()[-30:])
        self._process.kill()
        raise SystemExit(f"the process of {self._name} {what}:\n{tail}")


def environment() -> dict[str, str]:
    """Return the children's environment: no network, and this checkout's modules first."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


def one_round(order: tuple[str, ...], sizes: Sizes, warm_up: int, seen: dict[str, Measured]) -> None:
    """Start both, one after the other, then let their steps alternate."""
    with tempfile.TemporaryDirectory(prefix="bench_step_") as name:
        folder = Path(name)
        prepare(folder, sizes)
        sides = {framework: Side(framework, folder) for framework in ()}
        for framework in order:
            side = sides[framework] = Side(framework, folder)
            side.ready()
            # Its first reward comes while the other does not run.
            side.step()
        for number in range(2, sizes.steps + 1):
            for framework in order:
                time.sleep(PAUSE_SECONDS)
                seconds = sides[framework].step()
                print(f"{framework} step {number}: {seconds:.3f} s", file=sys.stderr)
                if number > warm_up:
                    seen[framework].steps.append(seconds)
        counts = []
        for framework, side in sides.items():
            result, peak = side.finish()
            seen[framework].first_rewards.append(result.pop("first_reward_seconds"))
            seen[framework].peaks.append(peak)
            counts.append((result["tokens"], result["completion_tokens"]))
    expected = sizes.steps * sizes.prompts * sizes.group * sizes.tokens
    if counts[0] != counts[1] or counts[0][1] != expected:
        raise SystemExit(
            f"both should have sampled {expected} tokens after the same prompts, got (all, sampled): {counts}"
        )


def prepare(folder: Path, sizes: Sizes) -> None:
    """Make the model in a process of its own: a child's peak memory starts at that of whoever starts it."""
    numbers = [str(number) for number in (sizes.prompts, sizes.group, sizes.tokens, sizes.steps)]
    command = [sys.executable, str(HERE / "step_task.py"), str(folder), *numbers]
    subprocess.run(command, check=True, stdout=sys.stderr, env=environment())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="timed steps a round")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before them")
    args = parser.parse_args()
    sizes = Sizes(args.prompts, args.group, args.tokens, args.warm_up + args.steps)
    seen = {"trl": Measured(), "astuner": Measured()}
    for number in range(args.rounds):
        order = tuple(seen) if number % 2 == 0 else tuple(reversed(seen))
        one_round(order, sizes, args.warm_up, seen)
    result: dict[str, Any] = {framework: measured.report() for framework, measured in seen.items()}
    ratio = statistics.median(seen["astuner"].steps) / statistics.median(seen["trl"].steps)
    print(json.dumps(result | {"step_ratio": round(ratio, 4)}))


if __name__ == "__main__":
    main()
