"""Audits a reward with a held-out judge, for signs of reward hacking.

A policy that exploits its judge raises the reward while a judge that it was not trained with sees no improvement, as in
"Scaling Laws for Reward Model Overoptimization" (arXiv:2210.10760).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from astuner.analysis.rescore.comparison import mean
from astuner.analysis.rescore.rank_correlation import kendall_tau, ranks
from astuner.run_record.rescores import Disagreement, DivergingStep, RewardAudit

_MAX_DISAGREEMENTS = 20


@dataclass(frozen=True, slots=True)
class RewardPair:
    """An episode with its reward and that of the held-out judge."""

    episode_id: str
    step: int
    reward: float
    held_out: float


def audit_rewards(judge: str, held_out: str, pairs: Sequence[RewardPair]) -> RewardAudit:
    """Return the audit of a reward.

    Args:
        judge, held_out: Names of the judges.
        pairs: The episodes that both have scored.
    """
    by_step: dict[int, list[RewardPair]] = {}
    for pair in pairs:
        by_step.setdefault(pair.step, []).append(pair)
    steps = [by_step[step] for step in sorted(by_step)]
    trend = _trend([[pair.reward for pair in step] for step in steps])
    held_out_trend = _trend([[pair.held_out for pair in step] for step in steps])
    return RewardAudit(
        judge=judge,
        held_out=held_out,
        episodes=len(pairs),
        kendall_tau=kendall_tau([pair.reward for pair in pairs], [pair.held_out for pair in pairs]),
        trend=trend,
        held_out_trend=held_out_trend,
        diverges=(trend or 0.0) > 0 > (held_out_trend or 0.0),
        diverging_steps=tuple(
            step for left, right in itertools.pairwise(steps) if (step := _diverging_step(left, right)) is not None
        ),
        disagreements=_disagreements(pairs),
    )


def _trend(steps: Sequence[Sequence[float]]) -> float | None:
    means = [mean(step) or 0.0 for step in steps]
    return kendall_tau(range(len(means)), means)


def _diverging_step(before: Sequence[RewardPair], after: Sequence[RewardPair]) -> DivergingStep | None:
    """Return the step `after` if its reward rises and its held-out reward falls by more than a standard error each."""
    rewards = [pair.reward for pair in before], [pair.reward for pair in after]
    held_out = [pair.held_out for pair in before], [pair.held_out for pair in after]
    if not (_change(*rewards) > _standard_error(*rewards) and _change(*held_out) < -_standard_error(*held_out)):
        return None
    means = [mean(values) or 0.0 for values in (*rewards, *held_out)]
    return DivergingStep(after[0].step, *means)


def _change(before: Sequence[float], after: Sequence[float]) -> float:
    return (mean(after) or 0.0) - (mean(before) or 0.0)


def _standard_error(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the standard error of the difference between two means."""
    return math.sqrt(sum(_variance(values) / len(values) for values in (before, after)))


def _variance(values: Sequence[float]) -> float:
    centre = mean(values) or 0.0
    return math.fsum((value - centre) ** 2 for value in values) / max(len(values) - 1, 1)


def _disagreements(pairs: Sequence[RewardPair]) -> tuple[Disagreement, ...]:
    """Return the episodes with the largest differences of ranks, as judges may have different scales."""
    rank, held_out = ranks([pair.reward for pair in pairs]), ranks([pair.held_out for pair in pairs])
    most_first = sorted(range(len(pairs)), key=lambda index: (-abs(rank[index] - held_out[index]), index))
    return tuple(
        Disagreement(
            pairs[index].episode_id, pairs[index].step, pairs[index].reward, pairs[index].held_out,
            rank[index], held_out[index],
        )
        for index in most_first[:_MAX_DISAGREEMENTS]
        if rank[index] != held_out[index]
    )  # fmt: skip
