"""What a run has done so far, as it stands in a checkpoint."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from astuner.run_record import (
    EpisodesSummary,
    RunSummary,
    TokensSummary,
    ValidationsSummary,
    ValidationSummary,
)
from astuner.schema import TokenCounts
from astuner.task_rollout.statistics import RunTotals, ValidationResult


@dataclass
class RunState:
    """Counters that go on when a run is resumed.

    Attributes:
        step: finished training steps.
        seconds_before: what earlier sessions of this run took.
        first_reward_seconds: from the start of the process to the first scored episode.
        before, after: validations.
        latest: the last validation.
        validated: the step that it was done at, None before the first one.
        totals: of the training episodes.
        steps_without_signal: in a row, until now.
    """

    step: int = 0
    seconds_before: float = 0.0
    first_reward_seconds: float | None = None
    before: dict[str, Any] | None = None
    after: dict[str, Any] | None = None
    latest: dict[str, Any] | None = None
    validated: int | None = None
    totals: RunTotals = field(default_factory=RunTotals)
    steps_without_signal: int = 0

    def dump(self, started: float) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return {**asdict(self), "seconds_before": self.seconds(started)}

    @staticmethod
    def load(values: dict[str, Any]) -> RunState:
        """Take back what `dump` gave."""
        totals = values["totals"]
        return RunState(**{**values, "totals": RunTotals(**{**totals, "tokens": TokenCounts(**totals["tokens"])})})

    def seconds(self, started: float) -> float:
        """Return how long the run has taken, earlier sessions included."""
        return self.seconds_before + time.time() - started

    def summary(self, *, backbone: str, seed: int, started: float, model: str | None) -> RunSummary:
        """Return what goes into summary.json."""
        totals = self.totals
        return RunSummary(
            backbone=backbone,
            seed=seed,
            steps=self.step,
            seconds=round(self.seconds(started), 3),
            validation=ValidationsSummary(before=_validation(self.before), after=_validation(self.after)),
            first_reward_seconds=self.first_reward_seconds,
            tokens=TokensSummary(**asdict(totals.tokens)),
            episodes=EpisodesSummary(ok=totals.ok, failed=totals.failed, dropped=totals.dropped),
            model=model,
        )


def validation_entry(result: ValidationResult) -> dict[str, Any]:
    """Return a validation as plain values, as `RunSummary` has them; None where nothing was scored."""
    measured = result.episodes > 0
    return {
        "success_rate": result.success_rate if measured else None,
        "reward": result.reward if measured else None,
        "episodes": result.episodes,
        "pass_at_k": {str(k): value for k, value in result.pass_at_k.items()} or None,
    }


def _validation(entry: dict[str, Any] | None) -> ValidationSummary | None:
    return None if entry is None else ValidationSummary(**entry)
