"""The counters of a run, which are saved in its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, TypeAdapter, ValidationError

from astuner.errors import RecordError, field_problems, first_line
from astuner.run_record.summary import EpisodesSummary, RunSummary, TokensSummary, ValidationsSummary, ValidationSummary
from astuner.system.clock import timestamp
from astuner.task_rollout.statistics import RunTotals, ValidationResult

# With a clock that was set back, earlier versions wrote negative durations.
Seconds = Annotated[float, Field(allow_inf_nan=False), AfterValidator(lambda seconds: max(seconds, 0.0))]
Rate = Annotated[float, Field(ge=0, le=1)]


@dataclass
class SourceState:
    """Where the draws from one reader are.

    Attributes:
        passes: the number of finished passes over the reader's tasks.
        position: the number of tasks that the current pass has drawn or skipped.
        deferred: ids of tasks that the last batch already contained, and that the next batch draws first.
        credit: how much the reader's share of the draws is behind its weight.
    """

    passes: NonNegativeInt = 0
    position: NonNegativeInt = 0
    deferred: list[str] = field(default_factory=list)
    credit: float = 0.0


@dataclass
class LeftOutTask:
    """A task that the difficulty filter leaves out, and the step after which it did."""

    step: NonNegativeInt
    cause: Literal["too easy", "too hard"]


@dataclass
class SamplingState:
    """The state of a `TaskSampler` after a step, for checkpoints.

    Attributes:
        step: the last step whose batch is drawn.
        recorded: the last step whose results are known.
        sources: the state of each reader by name; "" is the name without a mixture.
        waiting: success rates by step and task id, of steps on which no batch depends yet.
        recent: the latest success rates by task id, the oldest first.
        left_out: the tasks that the difficulty filter leaves out, by id.
    """

    step: NonNegativeInt = 0
    recorded: NonNegativeInt = 0
    sources: dict[str, SourceState] = field(default_factory=dict)
    waiting: dict[NonNegativeInt, dict[str, Rate]] = field(default_factory=dict)
    recent: dict[str, list[Rate]] = field(default_factory=dict)
    left_out: dict[str, LeftOutTask] = field(default_factory=dict)


@dataclass
class RunState:
    """Counters that a resumed run continues.

    Attributes:
        seconds_before: seconds that this run's earlier processes took.
        first_reward_seconds: seconds from the start of the process to the first scored episode; None before it.
        before, after: the first and the last validation, as in `RunSummary`.
        validated: the step of the latest validation; None if there was none.
        steps_without_signal: number of consecutive steps without learning signal, up to the current one.
        judge_tokens, judge_cost: the tokens and the cost of the judge's LLM for all episodes so far.
        task_sampling: the state of the task sampler after `step`; None if the run has none.
    """

    step: NonNegativeInt = 0
    seconds_before: Seconds = 0.0
    first_reward_seconds: Seconds | None = None
    before: dict[str, Any] | None = None
    after: dict[str, Any] | None = None
    latest: dict[str, Any] | None = None
    validated: NonNegativeInt | None = None
    totals: RunTotals = field(default_factory=RunTotals)
    steps_without_signal: NonNegativeInt = 0
    judge_tokens: NonNegativeFloat = 0.0
    judge_cost: NonNegativeFloat = 0.0
    task_sampling: SamplingState | None = None

    def dump(self, started: float) -> dict[str, Any]:
        """Return the counters as plain values, for a checkpoint."""
        return {**asdict(self), "seconds_before": self.seconds(started)}

    @staticmethod
    def load(values: dict[str, Any]) -> RunState:
        """Restore what `dump` returned in this or another version of astuner. RecordError: the values are damaged."""
        try:
            missing = {"step", "totals"}.difference(values)
            if missing:
                raise ValueError(f"it has no {', '.join(sorted(missing))}")
            state = TypeAdapter(RunState).validate_python(values)
            for entry in (state.before, state.after, state.latest):
                _validation(entry)
        except (ValueError, TypeError) as error:
            reason = field_problems(error)[0] if isinstance(error, ValidationError) else first_line(error)
            raise RecordError(
                f"the progress in the checkpoint is damaged ({reason}); remove the newest folder in checkpoints/ to "
                "resume from the one before, or set trainer_common.resume: false to start from scratch"
            ) from error
        return state

    def seconds(self, started: float) -> float:
        """Return the duration of the run in seconds, including earlier processes; `started` is a `timestamp`."""
        return self.seconds_before + timestamp() - started

    def summary(
        self, *, backbone: str, seed: int, started: float, model: str | None, tasks_left_out: Mapping[str, int]
    ) -> RunSummary:
        """Return the content of `summary.json`."""
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
            tasks_left_out=dict(tasks_left_out),
        )


def validation_entry(result: ValidationResult) -> dict[str, Any]:
    """Return a validation as plain values, as in `RunSummary`. Rates are None if no episode was scored."""
    is_scored = result.episodes > 0
    return {
        "success_rate": result.success_rate if is_scored else None,
        "reward": result.reward if is_scored else None,
        "episodes": result.episodes,
        "pass_at_k": {str(k): value for k, value in result.pass_at_k.items()} or None,
    }


def _validation(entry: dict[str, Any] | None) -> ValidationSummary | None:
    return None if entry is None else ValidationSummary(**entry)
