"""Compares the recorded rewards with another judge's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from astuner.algorithms import Algorithm
from astuner.algorithms.credit_assignment import step_advantages
from astuner.analysis.rescore.judging import JudgedEpisode
from astuner.analysis.rescore.rank_correlation import kendall_tau
from astuner.config.root import AstunerConfig
from astuner.run_record.rescores import RescoredEpisode, RescoredStep
from astuner.schema import Episode

# Smaller differences of advantages are due to rounding.
_TOLERANCE = 1e-6

_Advantages = dict[str, tuple[float, dict[str, float]]]
"""By episode id, the advantage of the episode, and by call id those of calls that differ from it."""


def compare(
    config: AstunerConfig, algorithm: Algorithm, judged: Sequence[JudgedEpisode]
) -> tuple[list[RescoredStep], list[RescoredEpisode]]:
    """Return a comparison for each step, in ascending order, and for each episode, in the given order.

    The advantages before and after are both computed from the rewards with the run's algorithm, as if the step was
    trained on these episodes. They contain no KL penalty, which depends on the reference model.

    Args:
        config: The configuration of the run.
        algorithm: Its algorithm, with a rule.
        judged: Episodes of one split.

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
        similarity=_cosine([row.advantage_before or 0.0 for row in rows], [row.advantage or 0.0 for row in rows]),
        gradient_differs=differs,
    )


def _differ(before: _Advantages, after: _Advantages) -> bool:
    """Return whether an advantage differs. An episode without advantage has no share in the gradient, as one with 0."""
    return any(
        not math.isclose(left, right, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
        for name in before.keys() | after.keys()
        for left, right in _paired(before.get(name, (0.0, {})), after.get(name, (0.0, {})))
    )


def _paired(
    left: tuple[float, Mapping[str, float]], right: tuple[float, Mapping[str, float]]
) -> list[tuple[float, float]]:
    calls = left[1].keys() | right[1].keys()
    # A call without its own advantage has that of the episode.
    return [(left[0], right[0]), *((left[1].get(call, left[0]), right[1].get(call, right[0])) for call in calls)]


def _cosine(left: Sequence[float], right: Sequence[float]) -> float | None:
    norms = math.hypot(*left) * math.hypot(*right)
    return math.fsum(a * b for a, b in zip(left, right, strict=True)) / norms if norms else None


def with_held_out(rows: Sequence[RescoredEpisode], held_out: Sequence[JudgedEpisode]) -> list[RescoredEpisode]:
    """Return the episodes with the rewards of the held-out judge."""
    rewards = {each.entry.path: each.after.reward for each in held_out}
    return [replace(row, held_out_reward=rewards.get(row.path)) for row in rows]
