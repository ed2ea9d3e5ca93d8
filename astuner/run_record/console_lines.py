"""The console's lines about a run: one line per step and per validation. The other metrics go to run.log only."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

from loguru import logger

from astuner.errors import counted
from astuner.run_record.metrics import MetricLogger, MetricsRow, success_interval
from astuner.system.clock import duration_text

FILE_ONLY = {"file_only": True}
"""Values to bind to a log record (`logger.bind(**FILE_ONLY)`) that is written to run.log but not to the console."""

_DETAILS = (
    "reward/mean", "success/rate", "val/reward", "val/success_rate", "val/loss", "loss/policy", "loss/kl", "loss/sft",
    "entropy", "grad_norm", "lr", "time/step",
)  # fmt: skip
# A validation's success rate by mixture reader.
_BY_SOURCE = "val/success_rate/"
_ALWAYS_PRINTED = ("reward/", "val/", "episodes/")
_MIN_SECONDS_BETWEEN_LINES = 10.0
_FORKS = "forks/"
_BARS = "▁▂▃▄▅▆▇█"


class ConsoleLogger(MetricLogger):
    """Logs one line of 80 columns per step and per validation to the console, and the details to run.log.

    Fast steps without episodes and validation are logged every 10 s only.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_line = -math.inf
        self._total: int | None = None
        self._rewards: list[float] = []
        self._started: tuple[int, float] | None = None  # the step before the first one of this process, and its end

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the main metrics."""
        values = [f"{name} {metrics[name]:.4g}" for name in _DETAILS if name in metrics]
        if not values:
            return
        now = self._clock()
        if "time/step" in metrics and self._started is None:
            self._started = (step - 1, now - metrics["time/step"])
        if (reward := metrics.get("reward/mean")) is not None:
            self._rewards.append(reward)
        is_frequent = now - self._last_line < _MIN_SECONDS_BETWEEN_LINES
        if is_frequent and not any(name.startswith(_ALWAYS_PRINTED) for name in metrics):
            return
        self._last_line = now
        parts = [f"step {step}" if self._total is None else f"step {step}/{self._total}"]
        if any(name.startswith("val/") for name in metrics):
            parts += ["validation", *_validation_parts(metrics)]
        else:
            parts += self._training_parts(step, metrics, now)
        logger.info("{}", "  ".join(parts))
        if sources := {name: rate for name, rate in metrics.items() if name.startswith(_BY_SOURCE)}:
            rates = (f"{name.removeprefix(_BY_SOURCE)} {rate:.0%}" for name, rate in sources.items())
            logger.info("  success by source: {}", ", ".join(rates))
        to_file = logger.bind(**FILE_ONLY)
        to_file.info("step {} · {}", step, " · ".join(values))
        if "episodes/total" in metrics:
            # For example: step 3: 64 episodes (2 failed), 128 calls → 64 samples, 15,360 → 9,216 distinct → 4,096
            # trained tokens (saving 1.7×), forks: 3 tools_changed
            lost = [f"{number:.0f} {name}" for name in ("failed", "dropped") if (number := metrics[f"episodes/{name}"])]
            suffix = f" ({', '.join(lost)})" if lost else ""
            line = (
                f"step {step}: {counted(metrics['episodes/total'], 'episode')}{suffix}, "
                f"{counted(metrics['calls/total'], 'call')} → {counted(metrics['samples/total'], 'sample')}, "
                f"{metrics['tokens/raw']:,.0f} → {metrics['tokens/distinct']:,.0f} distinct → "
                f"{metrics['tokens/trained']:,.0f} trained tokens (saving {metrics['tokens/saving']:.1f}×)"
            )
            forks = [(number, name.removeprefix(_FORKS)) for name, number in metrics.items() if name.startswith(_FORKS)]
            causes = [f"{number:.0f} {cause}" for number, cause in sorted(forks, key=lambda fork: -fork[0]) if number]
            to_file.info("{}", (f"{line}, forks: {', '.join(causes)}" if causes else line))

    def expect_steps(self, total: int) -> None:
        """Take the run's number of training steps."""
        self._total = total

    def restart(self, rows: Sequence[MetricsRow]) -> None:
        """Continue the curve of the rewards. Lines that were printed cannot be removed."""
        rewards = (row.metrics.get("reward/mean") for row in rows)
        self._rewards = [reward for reward in rewards if reward is not None]

    def _training_parts(self, step: int, metrics: Mapping[str, float], now: float) -> list[str]:
        parts = []
        if "reward/mean" in metrics:
            parts.append(f"reward {metrics['reward/mean']:.2f} {spark_line(self._rewards)}")
        if "success/rate" in metrics:
            parts.append(f"success {metrics['success/rate']:.0%}")
        if "loss/sft" in metrics:
            parts.append(f"loss {metrics['loss/sft']:.4f}")
        if "time/step" in metrics:
            parts.append(f"{metrics['time/step']:.1f} s")
        if self._started is not None and self._total is not None and step < self._total:
            # The time of validations counts, too.
            first, began = self._started
            remaining = (now - began) / max(step - first, 1) * (self._total - step)
            parts.append(f"eta {duration_text(remaining)}")
        parts += [f"{metrics[f'episodes/{name}']:.0f} {name}" for name in ("failed", "dropped")
                  if metrics.get(f"episodes/{name}")]  # fmt: skip
        return parts


def spark_line(values: Sequence[float], width: int = 8) -> str:
    """Return the last `width` values as bars, from the lowest to the highest of them."""
    shown = values[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    return "".join(_BARS[round((value - low) / (high - low) * 7) if high > low else 3] for value in shown)


def _validation_parts(metrics: Mapping[str, float]) -> list[str]:
    parts = []
    rate, episodes = metrics.get("val/success_rate"), int(metrics.get("val/episodes", 0))
    if rate is not None and episodes:
        low, high = success_interval(rate, episodes)
        parts.append(f"success {rate:.0%} ({low:.0%} to {high:.0%})")
    if "val/reward" in metrics:
        parts.append(f"reward {metrics['val/reward']:.2f}")
    if "val/loss" in metrics:
        parts.append(f"loss {metrics['val/loss']:.4f}")
    if episodes:
        parts.append(f"{episodes} episodes")
    if metrics.get("val/lost"):
        parts.append(f"{metrics['val/lost']:.0f} lost")
    if "time/validation" in metrics:
        parts.append(f"{metrics['time/validation']:.1f} s")
    return parts
