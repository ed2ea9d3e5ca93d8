"""`metrics.jsonl`: one line per call of `log_metrics`. All other loggers repeat its content. Intervals of rates."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loguru import logger

from astuner.errors import RecordError, shorten
from astuner.run_record.files import JsonLines, OnDamaged, read_rows
from astuner.system.redaction.redactor import redact

METRICS_FILE = "metrics.jsonl"
_Z95 = 1.959964  # the 97.5% quantile of the normal distribution


@dataclass(frozen=True, slots=True)
class MetricsRow:
    """One line of `metrics.jsonl`.

    Attributes:
        step: The training step; 0 is before the first update.
        time: Time of logging, in seconds since the epoch.
        metrics: Values by name; None for NaN and infinities.
    """

    step: int
    time: float
    metrics: Mapping[str, float | None]

    @property
    def is_validation(self) -> bool:
        """Whether the row belongs to a validation, not to a training step."""
        return any(name.startswith("val/") for name in self.metrics)


class MetricLogger:
    """A destination of finite metrics. A logger that need not do anything inherits the method."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log metrics of a step; `RecordError` if a file cannot be written."""
        raise NotImplementedError

    def expect_steps(self, total: int) -> None:
        """Take the run's number of training steps. Called once, before the first step."""

    def restart(self, rows: Sequence[MetricsRow]) -> None:
        """Make the metrics in the run's folder those of `rows`, which a resumed run keeps; errors as for `log`."""

    def close(self) -> None:
        """Write pending metrics and close the logger."""


class MetricsFile:
    """Writer of `metrics.jsonl`."""

    def __init__(self, folder: Path) -> None:
        """Open the file in the run's `folder`; `RecordError` if that fails."""
        self._lines = JsonLines(folder / METRICS_FILE)
        self._warned: set[str] = set()

    def log(self, step: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Append a line and return the metrics that are finite.

        NaN and infinities are written as null. One warning lists the names that had no warning before.

        Raises:
            RecordError: If the line cannot be written.
        """
        numbers = {redact(name): float(value) for name, value in metrics.items()}
        finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
        lost = [name for name in numbers if name not in finite and name not in self._warned]
        if lost:
            self._warned.update(lost)
            logger.warning(
                "step {}: metrics that are not finite are recorded as null, with one warning for each: {}",
                step,
                shorten(", ".join(f"{name} is {numbers[name]}" for name in lost), 2000),
            )
        row = {"step": step, "time": time.time(), "metrics": {name: finite.get(name) for name in numbers}}
        self._lines.append(row)
        return finite

    def truncate_after(self, step: int, validated: int) -> int:
        """Remove later lines and repeated lines, and return their number; see `RunRecord.truncate_after`."""

        def identify(row: Mapping[str, Any]) -> Hashable | None:
            content = _parse(row)
            # A step may be logged in several parts, with different metrics.
            part = "validation" if content.is_validation else frozenset(content.metrics)
            return (content.step, part) if content.step <= (validated if content.is_validation else step) else None

        return self._lines.retain_rows(identify)[0]

    def check_in_place(self) -> None:
        """Raise `RecordError` if the file was deleted, moved, replaced or shortened."""
        self._lines.check_in_place()

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def read_metrics(folder: Path, on_damaged: OnDamaged | None = None) -> list[MetricsRow]:
    """Return the metrics for the run in `folder`, in logging order. A step may have several rows.

    Args:
        folder: The run's folder.
        on_damaged: Called for lines that are not metrics, which are skipped. If None, such a line is an error.

    Raises:
        RecordError: If there is no metrics file, or it cannot be read.
    """
    return read_rows(folder / METRICS_FILE, _parse, on_damaged)


def _parse(row: Mapping[str, Any]) -> MetricsRow:
    missing = [name for name in ("step", "time", "metrics") if name not in row]
    if missing:
        raise RecordError(f"a line has no {', '.join(map(repr, missing))}; expected step, time and metrics")
    step, seconds, metrics = row["step"], row["time"], row["metrics"]
    if type(step) is not int or step < 0:
        raise RecordError(f"step is {str(step)[:60]!r}; expected a whole number of at least 0")
    if not _is_number(seconds):
        raise RecordError(f"time is {str(seconds)[:60]!r}; expected seconds since the epoch")
    if not isinstance(metrics, dict) or not all(value is None or _is_number(value) for value in metrics.values()):
        raise RecordError(f"metrics is {str(metrics)[:60]!r}; expected an object with a number or null for each name")
    return MetricsRow(step, seconds, metrics)


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max  # type: ignore[arg-type]


def success_interval(rate: float, episodes: int) -> tuple[float, float]:
    """Return the 95% interval of a success rate: Wilson's score interval.

    E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927). Unlike the
    normal approximation, it stays within 0 and 1 and has a width at rates of 0 and 1.

    Args:
        rate: share of the episodes that succeeded, 0 to 1.
        episodes: number of episodes, at least 1, taken as independent.
    """
    square = _Z95**2 / episodes
    centre = (rate + square / 2) / (1 + square)
    half = _Z95 / (1 + square) * math.sqrt(rate * (1 - rate) / episodes + square / (4 * episodes))
    return max(centre - half, 0.0), min(centre + half, 1.0)


def difference_interval(before: float, n_before: int, after: float, n_after: int) -> tuple[float, float]:
    """Return the 95% interval for the difference between two success rates, after minus before.

    Newcombe's hybrid score interval from the intervals of both rates: R. G. Newcombe, "Interval estimation for the
    difference between independent proportions", Statistics in Medicine 17 (1998), method 10.

    Args:
        before, after: the rates, 0 to 1.
        n_before, n_after: their numbers of episodes, at least 1 each, taken as independent.
    """
    low_before, high_before = success_interval(before, n_before)
    low_after, high_after = success_interval(after, n_after)
    difference = after - before
    return (
        difference - math.hypot(after - low_after, high_before - before),
        difference + math.hypot(high_after - after, before - low_before),
    )


def mean_interval(mean: float, variance: float, episodes: int) -> tuple[float, float]:
    """Return the 95% interval of a mean in the normal approximation.

    Args:
        mean: mean of the values.
        variance: their unbiased variance.
        episodes: number of values, at least 1, taken as independent.
    """
    half = _Z95 * math.sqrt(variance / episodes)
    return mean - half, mean + half
