"""Compares the recorded rewards with another judge's, and audits a reward for signs of reward hacking.

A policy that exploits its judge raises the reward while a judge that it was not trained with sees no improvement, as in
"Scaling Laws for Reward Model Overoptimization" (arXiv:2210.10760).
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from astuner.algorithms.credit_assignment import step_advantages
from astuner.algorithms.registry import Algorithm
from astuner.analysis.rescore.judging import JudgedEpisode
from astuner.config.root import AstunerConfig
from astuner.run_record.rescores import Disagreement, DivergingStep, RescoredEpisode, RescoredStep, RewardAudit
from astuner.schema import Episode

# Smaller differences of advantages are due to rounding.
_TOLERANCE = 1e-6
_Advantages = dict[str, tuple[float, dict[str, float]]]
"""By episode id, the episode's advantage, and by call id those of calls that differ from it."""
_MAX_DISAGREEMENTS = 20


def kendall_tau(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Return Kendall's tau-b for two equally long sequences; it accounts for ties.

    Computed in O(n log n) as in Knight, "A Computer Method for Calculating Kendall's Tau with Ungrouped Data" (1966):
    the discordant pairs are the inversions of `right` after sorting by `left`, and by `right` among equal values.

    Args:
        left, right: [N] finite numbers.

    Returns:
        A number from -1 to 1; None if all values of a sequence are equal, or N < 2.
    """
    x, y = np.asarray(left, dtype=np.float64), np.asarray(right, dtype=np.float64)
    order = np.lexsort((y, x))
    x, y = x[order], y[order]
    pairs = len(x) * (len(x) - 1) // 2
    ties_x, ties_y = _tied_pairs(x), _tied_pairs(y)
    ties_both = _tied_pairs(np.unique(np.column_stack((x, y)), axis=0, return_inverse=True)[1].ravel())
    if pairs in (ties_x, ties_y):
        return None
    concordant_minus_discordant = pairs - ties_x - ties_y + ties_both - 2 * _inversions(y)
    tau = concordant_minus_discordant / math.sqrt((pairs - ties_x) * (pairs - ties_y))
    return max(-1.0, min(1.0, tau))


def ranks(values: Sequence[float]) -> list[float]:
    """Return, for each value, the share of the other values below it, from 0 to 1; equal values count half."""
    array = np.asarray(values, dtype=np.float64)
    in_order = np.sort(array)
    below, not_above = np.searchsorted(in_order, array, "left"), np.searchsorted(in_order, array, "right")
    return [float(share) for share in (below + not_above - 1) / 2 / max(len(array) - 1, 1)]


def _tied_pairs(values: NDArray[np.generic]) -> int:
    counts = np.unique(values, return_counts=True)[1].astype(np.int64)
    return int((counts * (counts - 1) // 2).sum())


def _inversions(values: NDArray[np.float64]) -> int:
    """Return the number of pairs i < j with values[i] > values[j], by a bottom-up merge sort."""
    total, width, current = 0, 1, values.copy()
    while width < len(current):
        for start in range(0, len(current) - width, 2 * width):
            left, right = current[start : start + width], current[start + width : start + 2 * width]
            total += int((len(left) - np.searchsorted(left, right, "right")).sum())
            current[start : start + 2 * width] = np.sort(current[start : start + 2 * width], kind="stable")
        width *= 2
    return total


def compare(
    config: AstunerConfig, algorithm: Algorithm, judged: Sequence[JudgedEpisode]
) -> tuple[list[RescoredStep], list[RescoredEpisode]]:
    """Return a comparison for each step, in ascending order, and for each episode, in the given order.

    The advantages before and after are both computed from the rewards with the run's algorithm, as if the step was
    trained on these episodes. They contain no KL penalty, which depends on the reference model.

    All episodes belong to one split, and the run's algorithm has a rule.

    Raises:
        BackboneError: If an advantage is not finite, because a reward is extreme.
    """
    by_step: dict[int, list[JudgedEpisode]] = {}
    for each in judged:
        by_step.setdefault(each.entry.step, []).append(each)
    steps, rows = [], {}
    for number in sorted(by_step):
        members = by_step[number]
        before = _advantages(config, algorithm, [each.before for each in members])
        after = _advantages(config, algorithm, [each.after for each in members])
        compared = [_episode(each, before, after) for each in members]
        rows.update({id(each): row for each, row in zip(members, compared, strict=True)})
        steps.append(_step(compared, differs=_differ(before, after)))
    return steps, [rows[id(each)] for each in judged]


def reward_correlation(pairs: Sequence[tuple[float | None, float | None]]) -> float | None:
    """Return Kendall's tau-b of the pairs in which both rewards exist."""
    both = [(left, right) for left, right in pairs if left is not None and right is not None]
    return kendall_tau([left for left, _ in both], [right for _, right in both]) if both else None


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that exist."""
    numbers = [value for value in values if value is not None]
    return math.fsum(numbers) / len(numbers) if numbers else None


def _advantages(config: AstunerConfig, algorithm: Algorithm, episodes: Sequence[Episode]) -> _Advantages:
    trained = [e for e in episodes if e.status == "ok" and e.reward is not None and any(c.trained for c in e.calls)]
    if not trained:
        return {}
    result = step_advantages(config, algorithm, trained, None)
    values = zip(trained, result.advantages.tolist(), result.call_advantages, strict=True)
    return {episode.episode_id: (advantage, dict(by_call)) for episode, advantage, by_call in values}


def _episode(each: JudgedEpisode, before: _Advantages, after: _Advantages) -> RescoredEpisode:
    entry, new = each.entry, each.after
    return RescoredEpisode(
        entry.episode_id, entry.task_id, entry.repeat_index, entry.step, entry.split, entry.path,
        reward_before=each.before.reward,
        reward=new.reward,
        advantage_before=before[entry.episode_id][0] if entry.episode_id in before else None,
        advantage=after[entry.episode_id][0] if entry.episode_id in after else None,
        is_success=new.is_success,
        error_kind=new.error_kind if new.reward is None else None,
        error=new.error if new.reward is None else None,
        judgement=each.judgement,
    )  # fmt: skip


def _step(rows: Sequence[RescoredEpisode], *, differs: bool) -> RescoredStep:
    advantages = [row.advantage_before or 0.0 for row in rows], [row.advantage or 0.0 for row in rows]
    norms = math.hypot(*advantages[0]) * math.hypot(*advantages[1])
    return RescoredStep(
        step=rows[0].step,
        split=rows[0].split,
        episodes=len(rows),
        changed=sum(row.is_changed for row in rows),
        sign_flips=sum(row.flips_sign for row in rows),
        unscored=sum(row.reward is None for row in rows),
        reward_before=mean([row.reward_before for row in rows]),
        reward=mean([row.reward for row in rows]),
        kendall_tau=reward_correlation([(row.reward_before, row.reward) for row in rows]),
        similarity=math.fsum(map(operator.mul, *advantages)) / norms if norms else None,
        gradient_differs=differs,
    )


def _differ(before: _Advantages, after: _Advantages) -> bool:
    """Return whether an advantage differs. An episode without advantage has no share in the gradient, as one with 0."""
    for name in before.keys() | after.keys():
        (left, left_calls), (right, right_calls) = (each.get(name, (0.0, {})) for each in (before, after))
        # A call without its own advantage has that of the episode.
        calls = left_calls.keys() | right_calls.keys()
        pairs = [(left, right), *((left_calls.get(call, left), right_calls.get(call, right)) for call in calls)]
        if not all(math.isclose(*pair, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE) for pair in pairs):
            return True
    return False


def with_held_out(rows: Sequence[RescoredEpisode], held_out: Sequence[JudgedEpisode]) -> list[RescoredEpisode]:
    """Return the episodes with the rewards of the held-out judge."""
    rewards = {each.entry.path: each.after.reward for each in held_out}
    return [replace(row, held_out_reward=rewards.get(row.path)) for row in rows]


@dataclass(frozen=True, slots=True)
class RewardPair:
    """An episode with its reward and that of the held-out judge."""

    episode_id: str
    step: int
    reward: float
    held_out: float


def audit_rewards(judge: str, held_out: str, pairs: Sequence[RewardPair]) -> RewardAudit:
    """Return the audit of a reward. `judge` and `held_out` name the judges, and both have scored the `pairs`."""
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
    variance = 0.0
    for values in (before, after):
        centre = mean(values) or 0.0
        variance += math.fsum((value - centre) ** 2 for value in values) / max(len(values) - 1, 1) / len(values)
    return math.sqrt(variance)


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
