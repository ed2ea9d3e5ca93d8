"""Whether the model of a run learned, in plain words with 95% intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from astuner.run_record.metrics import MetricsRow, difference_interval, success_interval
from astuner.run_record.summary import RunSummary, ValidationsSummary, ValidationSummary

Outcome = Literal["learned", "worse", "unclear", "nothing", "unmeasured"]
OUTCOME_WORDS: dict[Outcome, str] = {
    "learned": "learned",
    "worse": "got worse",
    "unclear": "no clear change",
    "nothing": "nothing to learn from",
    "unmeasured": "cannot tell",
}
"""The verdict in words."""

_FEW_EPISODES = 50
_FEW_STEPS = 20
_TINY_KL = 1e-6


@dataclass(frozen=True, slots=True)
class RunVerdict:
    """Whether a run's model learned, judged by its validations and metrics.

    Attributes:
        outcome: whether the success rate rose or fell beyond noise, or the loss on the validation transcripts fell;
            `nothing` if it did neither, and the episodes had nothing to learn from; `unmeasured` without a validation
            before and after.
        lines: sentences for the user, the verdict first.
        suggestions: possible reasons that the model did not learn, with the keys to change.
    """

    outcome: Outcome
    lines: tuple[str, ...]
    suggestions: tuple[str, ...] = ()


def run_verdict(summary: RunSummary | None, rows: Sequence[MetricsRow]) -> RunVerdict:
    """Return whether the model learned, with what certainty, and which keys to change if it did not.

    A run that has not finished has no summary. Its validations are taken from `rows`, the run's metrics.
    """
    validation = summary.validation if summary else _validations_so_far(rows)
    before, after = validation.before, validation.after
    if summary is not None and not summary.steps:
        if after is None or after.reward is None:
            return RunVerdict("unmeasured", _rolled_out(rows))
        return RunVerdict("unmeasured", (f"success {_rate_text(after)}; reward {after.reward:.3f}",))
    lines: list[str] = []
    suggestions: list[str] = []
    outcome: Outcome = "unmeasured"
    losses = [(row.step, loss) for row in rows if (loss := row.metrics.get("val/loss")) is not None]
    if before and after and before.success_rate is not None and after.success_rate is not None:
        outcome, line = _compare(before, after)
        lines.append(line)
    elif len(losses) > 1 and losses[0][0] == 0:
        outcome, line = _compare_losses(losses[0][1], losses[-1][1])
        lines.append(line)
    elif summary is not None:
        line, suggestion = _what_is_missing(after)
        lines.append(line)
        suggestions.append(suggestion)
    if summary is not None and outcome in ("unclear", "unmeasured") and (reason := _nothing_to_learn(summary, rows)):
        outcome = "nothing"
        lines.insert(0, f"nothing to learn from: {reason}")
    rewards = [reward for row in rows if (reward := row.metrics.get("reward/mean")) is not None]
    if len(rewards) > 1:
        quarter = max(len(rewards) // 4, 1)
        first, last = math.fsum(rewards[:quarter]) / quarter, math.fsum(rewards[-quarter:]) / quarter
        lines.append(f"training reward {first:.2f} → {last:.2f} (means of the first and last {_steps(quarter)})")
    lines += _notes(rows)
    if summary is not None and outcome in ("unclear", "worse", "nothing"):
        suggestions = _suggestions(before, rows)
    return RunVerdict(outcome, tuple(lines), tuple(suggestions))


def _rolled_out(rows: Sequence[MetricsRow]) -> tuple[str, ...]:
    """Return a line about the episodes of a run that neither trains nor validates; none if it has no reward."""
    found = next((row.metrics for row in rows if row.metrics.get("reward/mean") is not None), None)
    if found is None:
        return ()
    rate, reward = found.get("success/rate"), f"mean reward {found['reward/mean']:.3g}"
    success = "" if rate is None else f", success {rate:.0%}"
    return (f"{found.get('episodes/total', 0):.0f} episodes, {reward}{success}; nothing was trained",)


def _validations_so_far(rows: Sequence[MetricsRow]) -> ValidationsSummary:
    """Return the first validation of the starting model and the latest validation, from the metrics."""
    passes = [
        (row.step, ValidationSummary(success_rate=rate, reward=row.metrics.get("val/reward"), episodes=int(number)))
        for row in rows
        if (rate := row.metrics.get("val/success_rate")) is not None
        and (number := row.metrics.get("val/episodes"))
        and 0 <= rate <= 1
        and number >= 1
    ]
    before = passes[0][1] if passes and passes[0][0] == 0 else None
    after = passes[-1][1] if passes and passes[-1][0] > 0 else None
    return ValidationsSummary(before=before, after=after)


def _compare(before: ValidationSummary, after: ValidationSummary) -> tuple[Outcome, str]:
    """Return whether success rose or fell beyond noise, and a line that states the change."""
    rates = before.success_rate or 0.0, after.success_rate or 0.0
    low, high = difference_interval(rates[0], max(before.episodes, 1), rates[1], max(after.episodes, 1))
    change = f"{100 * (rates[1] - rates[0]):+.0f} points, 95% interval {100 * low:+.0f} to {100 * high:+.0f}"
    outcome: Outcome
    if low > 0:
        outcome, text = "learned", "it learned"
    elif high < 0:
        outcome, text = "worse", "it got worse"
    else:
        outcome, text = "unclear", "no clear change"
    return outcome, f"{text}: success {_rate_text(before)} → {_rate_text(after)} ({change})"


def _compare_losses(before: float, after: float) -> tuple[Outcome, str]:
    """Return whether the loss on the validation transcripts fell. It has no noise: the transcripts are the same."""
    outcome: Outcome = "learned" if after < before else "worse" if after > before else "unclear"
    text = {"learned": "it learned", "worse": "it got worse", "unclear": "no change"}[outcome]
    return outcome, f"{text}: loss on the validation transcripts {before:.4g} → {after:.4g}"


def _what_is_missing(after: ValidationSummary | None) -> tuple[str, str]:
    """Return why a run cannot tell whether it learned, and what to add."""
    if after is not None and after.success_rate is not None:
        return (
            "cannot tell whether it learned: the starting model was not measured (val_before_train: False). Success at "
            f"the end: {_rate_text(after)}",
            "set trainer_common.val_before_train: True",
        )
    return (
        "cannot tell whether it learned: the run has no validation with a result",
        "give validation tasks (task_reader), and set trainer_common.val_before_train: True",
    )


def _nothing_to_learn(summary: RunSummary, rows: Sequence[MetricsRow]) -> str:
    """Return why the training episodes had nothing to learn from; "" if they had."""
    episodes = summary.episodes
    total = episodes.ok + episodes.failed + episodes.dropped
    if 2 * episodes.failed > total:
        return f"{episodes.failed} of {total} episodes failed"
    if total and 2 * episodes.dropped > total:
        return f"{episodes.dropped} of {total} episodes had no token to train"
    steps, without = _signal_counts(rows)
    if not steps or without < steps:
        return ""
    values = {row.metrics[name] for row in rows for name in ("reward/min", "reward/max") if name in row.metrics}
    if len(values) == 1:
        return f"every reward was {values.pop():g}"
    return "all episodes of each task had equal rewards, in every step"


def _rate_text(entry: ValidationSummary) -> str:
    if entry.success_rate is None:
        return "unknown"
    low, high = success_interval(entry.success_rate, max(entry.episodes, 1))
    margin = max(high - entry.success_rate, entry.success_rate - low)  # the interval is not symmetric
    return f"{entry.success_rate:.1%} ± {100 * margin:.0f} on {entry.episodes} episodes"


def _notes(rows: Sequence[MetricsRow]) -> list[str]:
    """Return a line about the distance from the starting model, and one about steps without a learning signal."""
    lines = []
    distances = [distance for row in rows if (distance := row.metrics.get("loss/kl")) is not None]
    if distances:
        lines.append(f"KL to the starting model: {distances[-1]:.3g} nats per token")
    steps, without = _signal_counts(rows)
    if without:
        lines.append(
            f"{without} of {_steps(steps)} had nothing to learn from: all episodes of each task had equal rewards"
        )
    return lines


def _signal_counts(rows: Sequence[MetricsRow]) -> tuple[int, int]:
    """Return the number of training steps, and how many have no learning signal."""
    steps = [row.metrics for row in rows if "episodes/total" in row.metrics]
    return len(steps), sum(metrics.get("update/groups_without_variance", 1.0) == 1.0 for metrics in steps)


def _suggestions(before: ValidationSummary | None, rows: Sequence[MetricsRow]) -> list[str]:
    """Return possible reasons that the model did not learn, with the keys to change."""
    texts: list[str] = []
    steps, without = _signal_counts(rows)
    if before is not None and (before.success_rate or 0.0) > 0.95:
        texts.append("the starting model already solves the validation tasks; use harder tasks")
    if steps and without > steps / 2:
        texts.append(
            "most steps had nothing to learn from; use easier or harder tasks, more rollout.num_repeat, a higher "
            "rollout.temperature, or a reward with more than two values"
        )
    changes = [change for row in rows if (change := row.metrics.get("kl/update")) is not None]
    if changes and max(changes) < _TINY_KL:
        texts.append("the updates hardly changed the model (kl/update); raise trainer_common.optim.lr")
    if steps and steps < _FEW_STEPS:
        texts.append(f"the run had {_steps(steps)}; raise trainer_common.total_training_steps")
    if before is not None and before.episodes < _FEW_EPISODES:
        texts.append(
            f"a validation has {before.episodes} episodes, so small changes cannot be seen; add validation tasks or "
            "raise rollout.val_kwargs.num_repeat"
        )
    return texts


def _steps(number: int) -> str:
    return f"{number} step" + ("" if number == 1 else "s")
