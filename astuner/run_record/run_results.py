"""The results of runs as rows with figures, for lists and comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from astuner.errors import RecordError
from astuner.run_record.intervals import difference_interval, success_interval
from astuner.run_record.metrics import MetricsRow, read_metrics
from astuner.run_record.run_facts import RunFacts, config_difference
from astuner.run_record.summary import ValidationSummary
from astuner.run_record.verdict import run_verdict

# Keys that differ between any two runs.
_NAMES = ("astuner.experiment_name", "astuner.experiment_dir")


def describe_run(facts: RunFacts) -> dict[str, Any]:
    """Return the row of a run in the list, as plain values. The last reward is read from metrics.jsonl."""
    return _describe(facts, _metrics(facts))


def describe_result(facts: RunFacts) -> dict[str, Any]:
    """Return the row of a run in a comparison: the row of the list, intervals, KL, tokens and the verdict.

    Returns:
        The values of `describe_run`, and: `interval_before` and `interval`, the 95% intervals of the success rates,
        each two shares or None; `episodes_before` and `episodes_after`, the episodes of these validations;
        `kl_start` and `kl_update`, the last values in nats per token; `tokens`, the counts of the summary; `outcome`,
        `verdict` and `suggestions`, as in `RunVerdict`.
    """
    rows = _metrics(facts)
    summary = facts.summary
    validation = summary.validation if summary else None
    before, after = (validation.before, validation.after) if validation else (None, None)
    verdict = run_verdict(summary, rows)
    return _describe(facts, rows) | {
        "interval_before": _interval(before),
        "interval": _interval(after),
        "episodes_before": before.episodes if before else None,
        "episodes_after": after.episodes if after else None,
        "kl_start": _last(rows, "loss/kl"),
        "kl_update": _last(rows, "kl/update"),
        "tokens": summary.tokens.model_dump() if summary else None,
        "outcome": verdict.outcome,
        "verdict": list(verdict.lines),
        "suggestions": list(verdict.suggestions),
    }


def result_difference(first: RunFacts, other: RunFacts) -> str:
    """Return a sentence that states whether the final success rates of two runs differ beyond noise."""
    ends = [_validation_after(facts) for facts in (first, other)]
    names = f"{other.name} and {first.name}"
    if ends[0] is None or ends[1] is None:
        return f"{names}: no success rates to compare"
    rates = [end.success_rate or 0.0 for end in ends if end is not None]
    low, high = difference_interval(rates[0], ends[0].episodes, rates[1], ends[1].episodes)
    beyond = "differ beyond noise" if low > 0 or high < 0 else "do not differ beyond noise"
    points = f"{100 * (rates[1] - rates[0]):+.1f} points, 95% interval {100 * low:+.1f} to {100 * high:+.1f}"
    return f"{names} {beyond}: {points}"


def setting_differences(runs: Sequence[RunFacts]) -> list[dict[str, Any]]:
    """Return the configuration keys whose values differ between runs, without the names of the runs."""
    rows = config_difference({facts.name: facts.folder for facts in runs})
    return [row for row in rows if row["key"] not in _NAMES]


def _describe(facts: RunFacts, rows: Sequence[MetricsRow]) -> dict[str, Any]:
    summary = facts.summary
    validation = summary.validation if summary else None
    rewards = [reward for row in rows if (reward := row.metrics.get("reward/mean")) is not None]
    return {
        "run": facts.name,
        "kind": facts.kind,
        "state": facts.state,
        "backbone": facts.backbone,
        "algorithm": facts.algorithm,
        "model": facts.model,
        "started": facts.started,
        "seconds": summary.seconds if summary else None,
        "steps": summary.steps if summary else len(rewards),
        "reward": rewards[-1] if rewards else None,
        "success_before": validation.before.success_rate if validation and validation.before else None,
        "success": validation.after.success_rate if validation and validation.after else None,
        "failed_episodes": summary.episodes.failed if summary else None,
        "note": facts.note.text,
        "tags": list(facts.note.tags),
        "folder": str(facts.folder),
    }


def _metrics(facts: RunFacts) -> list[MetricsRow]:
    try:
        return read_metrics(facts.folder, lambda _: None)
    except RecordError:
        return []


def _last(rows: Sequence[MetricsRow], name: str) -> float | None:
    return next((value for row in reversed(rows) if (value := row.metrics.get(name)) is not None), None)


def _interval(entry: ValidationSummary | None) -> list[float] | None:
    if entry is None or entry.success_rate is None or not entry.episodes:
        return None
    return list(success_interval(entry.success_rate, entry.episodes))


def _validation_after(facts: RunFacts) -> ValidationSummary | None:
    after = facts.summary.validation.after if facts.summary else None
    return after if after and after.success_rate is not None and after.episodes else None
