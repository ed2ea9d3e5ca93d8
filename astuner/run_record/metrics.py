"""`metrics.jsonl`: one line per call of `log_metrics`. All other loggers repeat its content."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from loguru import logger

from astuner.errors import RecordError
from astuner.run_record.files import JsonLines, read_json_lines
from astuner.run_record.secrets import redact

METRICS_FILE = "metrics.jsonl"


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


class MetricsFile:
    """Writer of `metrics.jsonl`."""

    def __init__(self, folder: Path) -> None:
        """Open the file in the run's `folder`.

        Raises:
            RecordError: If the file cannot be opened.
        """
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
                ", ".join(f"{name} is {numbers[name]}" for name in lost),
            )
        row = {"step": step, "time": time.time(), "metrics": {name: finite.get(name) for name in numbers}}
        self._lines.append(row)
        return finite

    def truncate_after(self, step: int) -> int:
        """Remove the lines of steps after `step` and return their number.

        Raises:
            RecordError: If they cannot be removed.
        """
        return self._lines.filter_rows(lambda row: int(row["step"]) <= step)

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def read_metrics(folder: Path) -> list[MetricsRow]:
    """Return the metrics of the run in `folder` in the order of logging. A step may have several rows.

    Raises:
        RecordError: If there is no metrics file, or it cannot be read.
    """
    path = folder / METRICS_FILE
    try:
        return [MetricsRow(row["step"], row["time"], row["metrics"]) for _, row in read_json_lines(path)]
    except KeyError as error:
        raise RecordError(f"{path}: a line has no {error}; expected step, time and metrics") from error
