"""Metrics for batches of episodes, used by all backbones."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

import numpy as np

from astuner.context_tracker.audit import count_tokens
from astuner.errors import UnscoredError
from astuner.schema import Episode, ForkCause, TokenCounts
from astuner.task_rollout.tool_use import ToolUse


@dataclass(frozen=True)
class ValidationResult:
    """The result of a validation, over the episodes that have a reward.

    Attributes:
        success_rate: fraction of successful episodes; NaN without episodes.
        reward: mean reward; NaN without episodes.
        episodes: the number of episodes with a reward.
        lost: the number of episodes that have no reward after all attempts; not included in the other numbers.
        pass_at_k: for each k, the unbiased estimate for the probability that one of a task's k episodes succeeds.
        success_by_source: success rate by reader of a mixture; empty without a mixture.
    """

    success_rate: float
    reward: float
    episodes: int
    lost: int
    pass_at_k: Mapping[int, float] = field(default_factory=dict)
    success_by_source: Mapping[str, float] = field(default_factory=dict)


@dataclass
class RunTotals:
    """Sums over the training episodes of a run."""

    tokens: TokenCounts = field(default_factory=TokenCounts)
    ok: int = 0
    failed: int = 0
    dropped: int = 0

    def add(self, episodes: Sequence[Episode], tokens: TokenCounts | None = None) -> None:
        """Add episodes to the totals; `tokens` are their counts, if they are known."""
        self.tokens += tokens_of(episodes) if tokens is None else tokens
        for episode in episodes:
            setattr(self, episode.status, getattr(self, episode.status) + 1)


def tokens_of(episodes: Sequence[Episode]) -> TokenCounts:
    """Return the token counts of episodes; `trained` counts only tokens in samples."""
    total = TokenCounts()
    for episode in episodes:
        counts = count_tokens(episode.calls)
        trained = sum(int(np.asarray(sample.train_counts).sum()) for sample in episode.samples)
        total += TokenCounts(counts.raw, counts.distinct, trained)
    return total


def scored(episodes: Sequence[Episode]) -> list[Episode]:
    """Return the episodes that have a reward."""
    return [episode for episode in episodes if episode.reward is not None]


def success_rates(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return the share of successful episodes by task id, for the tasks with a scored episode."""
    successes: dict[str, list[float]] = defaultdict(list)
    for episode in scored(episodes):
        successes[episode.task.task_id].append(float(bool(episode.is_success)))
    return {task_id: _mean(outcomes) for task_id, outcomes in successes.items()}


def success_by_source(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return the success rate for each reader in a mixture; empty without a mixture."""
    successes: dict[str, list[float]] = defaultdict(list)
    for episode in scored(episodes):
        if episode.task.source:
            successes[episode.task.source].append(float(bool(episode.is_success)))
    return {source: _mean(outcomes) for source, outcomes in sorted(successes.items())}


def validation_result(episodes: Sequence[Episode], largest_k: int) -> ValidationResult:
    """Summarise validation episodes.

    Args:
        largest_k: pass@k is estimated for k = 1, 2, 4, … and `largest_k`, as far as every task has k scored episodes.
    """
    with_reward = scored(episodes)
    unscored = {(e.task.task_id, e.repeat_index) for e in episodes}
    unscored -= {(e.task.task_id, e.repeat_index) for e in with_reward}
    successes: dict[str, list[bool]] = defaultdict(list)
    for episode in with_reward:
        successes[episode.task.task_id].append(bool(episode.is_success))
    max_k = min((len(outcomes) for outcomes in successes.values()), default=0)
    ks = {k for k in (1, 2, 4, 8, 16, 32, 64, largest_k) if k <= min(largest_k, max_k)}
    return ValidationResult(
        success_rate=_mean([float(bool(episode.is_success)) for episode in with_reward]),
        reward=_mean([float(episode.reward or 0.0) for episode in with_reward]),
        episodes=len(with_reward),
        lost=len(unscored),
        pass_at_k={k: _mean([pass_at_k(len(o), sum(o), k) for o in successes.values()]) for k in sorted(ks)},
        success_by_source=success_by_source(episodes),
    )


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the unbiased estimate for the probability that one of k attempts succeeds, given `correct` successes in n.

    1 - C(n - c, k) / C(n, k): Chen et al., "Evaluating large language models trained on code",
    arXiv:2107.03374, eq. 1.

    Raises:
        ValueError: k is larger than n.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} attempts, got {n}")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def batch_metrics(episodes: Sequence[Episode], tokens: TokenCounts | None = None) -> dict[str, float]:
    """Return a training batch's metrics: rewards, success, lengths, counts, and the workflow's `log_metrics`."""
    tokens = tokens_of(episodes) if tokens is None else tokens
    rewarded = scored(episodes)
    metrics = {
        "reward/mean": _mean([float(episode.reward or 0.0) for episode in rewarded]),
        "reward/max": max((float(episode.reward or 0.0) for episode in rewarded), default=math.nan),
        "reward/min": min((float(episode.reward or 0.0) for episode in rewarded), default=math.nan),
        "success/rate": _mean([float(bool(episode.is_success)) for episode in rewarded]),
        "episodes/total": len(episodes),
        "episodes/ok": sum(episode.status == "ok" for episode in episodes),
        "episodes/failed": sum(episode.status == "failed" for episode in episodes),
        "episodes/cut": sum(episode.status == "ok" and episode.error_kind is not None for episode in episodes),
        "episodes/dropped": sum(episode.status == "dropped" for episode in episodes),
        "episodes/calls": _mean([len(episode.calls) for episode in episodes]),
        "episodes/samples": _mean([len(episode.samples) for episode in episodes]),
        "episodes/dropped_samples": sum(episode.dropped_samples for episode in episodes),
        "episodes/ended_processes": sum(len(episode.ended_processes) for episode in episodes),
        "calls/total": sum(len(episode.calls) for episode in episodes),
        "samples/total": sum(len(episode.samples) for episode in episodes),
        "tokens/raw": tokens.raw,
        "tokens/distinct": tokens.distinct,
        "tokens/trained": tokens.trained,
        "tokens/saving": tokens.saving,
    }
    metrics.update({f"success/rate/{source}": rate for source, rate in success_by_source(episodes).items()})
    metrics.update(_lengths(episodes))
    forks = Counter(call.fork.cause for episode in episodes for call in episode.calls if call.fork is not None)
    metrics["episodes/forks"] = forks.total()
    # Every cause is logged in every step, so that the curves include zeros.
    metrics.update({f"forks/{cause}": forks[cause] for cause in get_args(ForkCause)})
    agents: dict[str, list[float]] = defaultdict(list)
    for episode in rewarded:
        for agent, reward in episode.agent_rewards.items():
            agents[agent].append(reward)
    metrics.update({f"reward/agent/{agent}": _mean(rewards) for agent, rewards in sorted(agents.items())})
    workflow: dict[str, list[float]] = defaultdict(list)
    for episode in rewarded:
        for name, value in episode.log_metrics.items():
            workflow[name].append(float(value))
    metrics.update({f"workflow/{name}": _mean(values) for name, values in workflow.items()})
    return metrics | _tool_metrics(episodes) | _judge_metrics(episodes)


def _tool_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return the use of tools; empty if no episode has tools."""
    uses = [use for use in map(ToolUse.of, episodes) if use.is_offered]
    if not uses:
        return {}
    return {
        "tools/offered": len(uses),
        "tools/used": sum(use.calls > 0 for use in uses),
        "tools/calls": _mean([use.calls for use in uses]),
        "tools/failed": sum(use.failed for use in uses),
    }


def _judge_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return the means of reward components and the judge's metrics, and the unscored episodes by cause.

    The judge's metrics include those of unscored episodes, which cost as much as others.
    """
    components: dict[str, list[float]] = defaultdict(list)
    judge: dict[str, list[float]] = defaultdict(list)
    for episode in episodes:
        if episode.judgement is not None:
            for name, value in episode.judgement.metrics.items():
                judge[name].append(value)
            for name, value in episode.judgement.components.items() if episode.reward is not None else ():
                components[name].append(value)
    kinds = [episode.error_kind or "" for episode in episodes if episode.status == "failed"]
    unscored = Counter(kind for kind in kinds if kind.partition("/")[0] == UnscoredError.kind)
    return {
        **{f"reward/{name}/mean": _mean(values) for name, values in sorted(components.items())},
        **{f"judge/{name}": _mean(values) for name, values in sorted(judge.items())},
        "episodes/unscored": unscored.total(),
        **{kind: count for kind, count in sorted(unscored.items()) if kind != UnscoredError.kind},
    }


def _lengths(episodes: Sequence[Episode]) -> dict[str, float]:
    calls = [call for episode in episodes for call in episode.calls]
    answers = [len(call.completion_ids) for call in calls]
    return {
        "length/prompt": _mean([len(call.prompt_ids) for call in calls]),
        "length/response": _mean(answers),
        "length/response_max": max(answers, default=math.nan),
        "length/sample": _mean([len(sample.token_ids) for episode in episodes for sample in episode.samples]),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
