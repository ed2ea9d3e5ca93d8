"""Measure the cost of the sync certificate and of the correction, as shares of a training step.

Two cases on the local backbone: the tiny math agent (`math_agent_tiny.yaml`, float32, two mini-batches), and sums with
SmolLM2-135M (`tutorial/example_real_model/sums.yaml`, bfloat16, one mini-batch), which needs the extra `smollm`. Both
correct with `token_tis`. Their starting models are created first if they are not in the cache.

The certificate compares the checksums of all weights after each sync and, after the first two syncs and
while all of it takes less than 1% of the time, the logprobs of four sampled tokens. The correction computes factors and
metrics and, with several mini-batches, the trainer's logprobs before the first update. CPU seconds of this process are
counted within the same steps, so that other processes hardly change the shares.

Prints one line of JSON: for each case the CPU seconds of a step and, relative to the step, those of one comparison of
checksums, of one comparison of logprobs, and of the correction, as medians over the steps that have them.
`time/certificate_of_run` is the share of both comparisons in the steps after the first.

    python bench/bench_sync.py [--cases tiny smollm2] [--conf FILE.yaml] [--steps 4]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from astuner import AstunerJob
from astuner.algorithms.correction import Correction
from astuner.backbone.local.backbone import LocalSession
from astuner.backbone.local.update import PolicyUpdate
from astuner.backbone.training.rl_loop import RlLoop

ROOT = Path(__file__).resolve().parents[1]
CASES = {
    "tiny": "tutorial/example_math_agent/math_agent_tiny.yaml",
    "smollm2": "tutorial/example_real_model/sums.yaml",
}
PARTS = {
    "checksums": [(LocalSession, "_compare_weights")],
    "logprobs": [(LocalSession, "_compare_logprobs")],
    "correction": [(Correction, "factors"), (PolicyUpdate, "_with_trainer_logprobs")],
}


class CpuSeconds:
    """The CPU seconds of a run's training steps, and those of their parts."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._spent: dict[str, float] = defaultdict(float)

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, which adds its time to a part."""

        def call(*arguments: Any, **named: Any) -> Any:
            started = time.process_time()
            try:
                return function(*arguments, **named)
            finally:
                self._spent[part] += time.process_time() - started

        return call

    def timed_step(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, a training step, which ends a list of parts."""

        def call(*arguments: Any, **named: Any) -> Any:
            self._spent.clear()  # of the first sync, before the first step
            result = self.timed("step", function)(*arguments, **named)
            self.steps.append(dict(self._spent))
            return result

        return call


def measure(path: Path, steps: int) -> dict[str, float]:
    """Train with the configuration in a file for some steps, and return the medians."""
    seconds = CpuSeconds()
    originals = [(cls, name, getattr(cls, name)) for parts in PARTS.values() for cls, name in parts]
    originals.append((RlLoop, "train_step", RlLoop.train_step))
    try:
        for part, functions in PARTS.items():
            for cls, name in functions:
                setattr(cls, name, seconds.timed(part, getattr(cls, name)))
        setattr(RlLoop, "train_step", seconds.timed_step(RlLoop.train_step))  # noqa: B010
        job = (
            AstunerJob()
            .load_job_from_yaml(path)
            .configure(
                {
                    "trainer_common.total_training_steps": steps,
                    "trainer_common.val_before_train": False,
                    "trainer_common.test_freq": 1000,
                    "trainer_common.save_freq": 1000,
                    "trainer_common.correction.mode": "token_tis",
                }
            )
        )
        with tempfile.TemporaryDirectory() as folder:
            job.tune(folder)
    finally:
        for cls, name, function in originals:
            setattr(cls, name, function)
    updated = [step for step in seconds.steps if "correction" in step]  # a step without signal has no update
    if not updated:
        raise SystemExit(f"{path}: no step had an update; raise --steps")
    shares = {
        f"time/{part}": statistics.median(step[part] / step["step"] for step in seconds.steps if part in step)
        for part in PARTS
    }
    later = seconds.steps[1:]  # logprobs are always compared in the first
    certificate = sum(step.get("checksums", 0.0) + step.get("logprobs", 0.0) for step in later)
    shares["time/certificate_of_run"] = certificate / sum(step["step"] for step in later)
    return {"steps": len(updated), "step_cpu_seconds": statistics.median(step["step"] for step in updated)} | shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--conf", type=Path, help="the configuration of another local run, instead of the cases")
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    paths = {args.conf.stem: args.conf} if args.conf else {case: ROOT / CASES[case] for case in args.cases}
    print(json.dumps({case: measure(path, args.steps) for case, path in paths.items()}))


if __name__ == "__main__":
    main()
