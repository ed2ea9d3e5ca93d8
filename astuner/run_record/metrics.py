"""`metrics.jsonl`: one line for every set of numbers that was logged. It is the record; all other sinks repeat it."""

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
        step: the training step; 0 is before the first update.
        time: when it was logged, in seconds since the epoch.
        metrics: numbers by name; None where the number was NaN or infinite.
    """

    step: int
    time: float
    metrics: Mapping[str, float | None]


class MetricsFile:
    """Appends to `metrics.jsonl`."""

    def __init__(self, folder: Path) -> None:
        """Open the file in the run's `folder`.

        Raises:
            RecordError: it cannot be opened.
        """
        self._lines = JsonLines(folder / METRICS_FILE)
        self._warned: set[str] = set()

    def log(self, step: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Append a line and return the metrics that are finite.

        A number that is NaN or infinite is written as null and warned of, once a name.

        Raises:
            RecordError: the line cannot be written.
        """
        numbers = {redact(name): float(value) for name, value in metrics.items()}
        finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
        self._warn_of(step, {name: value for name, value in numbers.items() if name not in finite})
        row = {"step": step, "time": time.time(), "metrics": {name: finite.get(name) for name in numbers}}
        self._lines.append(row)
        return finite

    def truncate_after(self, step: int) -> int:
        """Remove the lines of steps later than `step`; return how many.

        Raises:
            RecordError: they cannot be removed.
        """
        return self._lines.keep_only(lambda row: int(row["step"]) <= step)

    def close(self) -> None:
        """Close the file."""
        self._lines.close()

    def _warn_of(self, step: int, lost: Mapping[str, float]) -> None:
        for name, value in lost.items():
            if name not in self._warned:
                self._warned.add(name)
                logger.warning(
                    "metric {} is {} in step {}; such values are recorded as null (this is said once)",
                    name,
                    value,
                    step,
                )


def read_metrics(folder: Path) -> list[MetricsRow]:
    """Return what the run in `folder` logged, in the order of logging; a step may have several rows.

    Raises:
        RecordError: there is no metrics file, or it cannot be read.
    """
    path = folder / METRICS_FILE
    try:
        return [MetricsRow(row["step"], row["time"], row["metrics"]) for row in read_json_lines(path)]
    except KeyError as error:
        raise RecordError(f"{path}: a line lacks {error}; expected step, time and metrics") from error
