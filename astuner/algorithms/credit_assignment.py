"""Credit assignment for a training step: from its episodes' rewards to its rows' advantages.

Every trainer uses it. A workflow may reward an episode, each of its agents, or each of its LLM calls. Statistics are
over episodes in all three cases, so that an episode with more calls does not weigh more.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from astuner.algorithms.advantages import (
    RewardComponents,
    has_signal,
    overlong_punishment,
    reward_components,
    rewards_with_kl,
)
from astuner.algorithms.call_advantages import add_to_calls, advantages_by_call, anchor_state_advantages
from astuner.algorithms.registry import Algorithm, ReinforcementRule
from astuner.algorithms.training_rows import SampleKey, TokenValues, TrainingRow, sample_updates
from astuner.config.root import AstunerConfig
from astuner.context_tracker.audit import response_length
from astuner.doors import through_door
from astuner.errors import BackboneError, LogprobGapError
from astuner.run_record.updates import SampleUpdate
from astuner.schema import Episode

if TYPE_CHECKING:
    from astuner.diagnostics.logprob_gap import TokenPairs

# The engine and the trainer hold the same weights at the start of a step, so their logprobs differ by rounding only
# (1e-5 in float32, some hundredths in bfloat16). A larger mean difference means that a weight sync failed.
MAX_LOGPROB_DIFFERENCE = {torch.float32: 1e-2, torch.bfloat16: 0.3}
# Larger absolute rewards and advantages make gradients overflow. No reward scale of a working agent reaches it.
_EXTREME = 1e6
_MAX_EPISODES_NAMED = 5


@dataclass(frozen=True)
class UpdateResult:
    """The result of a training step on E episodes.

    Attributes:
        advantages: [E], in the order of the episodes.
        signal: whether any rewards that are compared with each other differ.
        samples: for each episode, how each of its samples was trained.
    """

    metrics: dict[str, float]
    advantages: tuple[float, ...]
    signal: bool
    samples: tuple[tuple[SampleUpdate, ...], ...] = ()


@dataclass(frozen=True)
class StepAdvantages:
    """The shaped rewards and the advantages of a step's E episodes.

    Attributes:
        episodes: E episodes with a reward and samples.
        rewards: [E] float32, after shaping.
        advantages: [E] float32.
        call_advantages: for each episode, by call id, the advantages of the calls that have a reward other than the
            episode's.
        has_signal: [E] bool, whether the rewards that an episode is compared with differ; True with a teacher.
        left_out: indices of episodes that are not trained because an answer was truncated.
    """

    episodes: Sequence[Episode]
    rule: ReinforcementRule
    rewards: Tensor
    advantages: Tensor
    call_advantages: Sequence[Mapping[str, float]]
    has_signal: Tensor
    left_out: frozenset[int] = frozenset()

    def trains(self, row: TrainingRow) -> bool:
        """Return whether the algorithm trains a row: with dynamic sampling, groups without signal are left out."""
        has_signal = not self.rule.dynamic_sampling or bool(self.has_signal[row.episode])
        return has_signal and row.episode not in self.left_out

    @property
    def groups(self) -> list[str]:
        """Each episode's group, which is the id of its task."""
        return [episode.task.task_id for episode in self.episodes]

    def assign_to(self, rows: Sequence[TrainingRow]) -> list[TrainingRow]:
        """Return the rows that the algorithm trains, with their advantages."""
        return [
            row.with_advantages(float(self.advantages[row.episode]), self.call_advantages[row.episode])
            for row in rows
            if self.trains(row)
        ]

    @property
    def extremes(self) -> list[float]:
        """[E], the largest absolute advantage of an episode and its calls; NaN if one is NaN."""
        largest = []
        for advantage, by_call in zip(self.advantages.tolist(), self.call_advantages, strict=True):
            values = [abs(value) for value in (advantage, *by_call.values())]
            largest.append(math.nan if any(map(math.isnan, values)) else max(values))
        return largest

    def explain_failure(self) -> str:
        """Return the likely cause of an update whose gradient is not finite, with its episodes and what to do."""
        rewards = [episode.reward or 0.0 for episode in self.episodes]
        by_reward = sorted(range(len(rewards)), key=lambda index: -abs(rewards[index]))
        if abs(rewards[by_reward[0]]) > _EXTREME:
            named = [index for index in by_reward if abs(rewards[index]) > _EXTREME]
            return (
                f"the rewards of {len(named)} episodes are extreme: {self._describe(named)}. Scale or clip the rewards "
                "in the workflow or the judge, for example to [-1, 1]"
            )
        extremes = self.extremes
        by_advantage = sorted(
            range(len(extremes)), key=lambda index: -math.inf if math.isnan(extremes[index]) else -extremes[index]
        )
        named = [index for index in by_advantage if not extremes[index] <= _EXTREME]
        if named:
            return (
                f"the advantages of {len(named)} episodes are extreme, and their rewards are not: "
                f"{self._describe(named)}. Check the rewards of single agents and calls; with use_kl_in_reward, lower "
                "trainer_common.algorithm.kl_coef"
            )
        return (
            f"no reward and no advantage is extreme (the largest: {self._describe(by_advantage[:1])}), so the weights "
            "or the logprobs overflow; lower trainer_common.optim.lr, or set model.dtype: float32"
        )

    def _describe(self, indexes: Sequence[int]) -> str:
        texts = [
            f"{self.episodes[index].episode_id} (reward {self.episodes[index].reward:.4g}, advantage "
            f"{float(self.advantages[index]):.4g})"
            for index in indexes[:_MAX_EPISODES_NAMED]
        ]
        return ", ".join(texts) + (", …" if len(indexes) > _MAX_EPISODES_NAMED else "")

    def gradient_error(self, step: int, norm: object) -> BackboneError:
        """Return the error for a gradient that is not finite; `norm` is its norm, or those of the mini-batches."""
        return BackboneError(
            f"step {step}: the gradient's norm is {norm}: {self.explain_failure()}. The step's episodes are in the run "
            "record"
        )

    def update_result(
        self,
        metrics: Mapping[str, float],
        rows: Sequence[TrainingRow],
        token_values: Mapping[SampleKey, TokenValues] | None = None,
    ) -> UpdateResult:
        """Return the result of the step.

        Args:
            rows: the trained rows, as `assign_to` returns them.
            token_values: the trainer's values for each sample's trained tokens, where the update has kept them.
        """
        task_has_signal: dict[str, bool] = defaultdict(bool)
        for episode, signal in zip(self.episodes, self.has_signal.tolist(), strict=True):
            task_has_signal[episode.task.task_id] |= signal
        without_signal = sum(not signal for signal in task_has_signal.values())
        step_metrics = {
            "reward/shaped": float(self.rewards.mean()),
            "update/groups_without_variance": without_signal / max(len(task_has_signal), 1),
        }
        if self.left_out:
            step_metrics["update/truncated_episodes"] = float(len(self.left_out))
        return UpdateResult(
            metrics=step_metrics | dict(metrics),
            advantages=tuple(self.advantages.tolist()),
            signal=bool(self.has_signal.any()),
            samples=sample_updates(self.episodes, rows, token_values or {}),
        )


def step_advantages(
    config: AstunerConfig, algorithm: Algorithm, episodes: Sequence[Episode], kl_sums: Tensor | None
) -> StepAdvantages:
    """Compute the advantages for a step's episodes, in which a task's episodes are a group.

    Args:
        algorithm: the resolved algorithm; it must have a rule.
        episodes: E episodes with a reward and samples.
        kl_sums: [E] float, the KL estimate of each episode; None if the reward has no KL term.

    Raises:
        BackboneError: an advantage is not finite, for example because a reward is too large for float32.
    """
    rule = algorithm.rule
    assert rule is not None
    raw = torch.tensor([episode.reward for episode in episodes], dtype=torch.float32)
    settings = config.trainer_common.algorithm
    response_lengths = torch.tensor([response_length(episode.calls) for episode in episodes])
    punished = raw + overlong_punishment(
        response_lengths, config.data.max_response_length, settings.overlong_buffer_length
    )
    rewards = punished if kl_sums is None else rewards_with_kl(punished, kl_sums, settings.kl_coef)
    group_ids, lengths = _group_ids(episodes), _lengths(episodes)
    parts = reward_components(episodes, settings.component_weights) if rule.advantage.by_component else None
    if parts is None:
        advantages = rule.advantages(rewards, group_ids, lengths)
    else:
        advantages = parts.advantages(group_ids, rule.norm_adv_by_std, rewards - raw)
    call_advantages = advantages_by_call(rule, episodes, rewards - raw, group_ids, lengths)
    if rule.advantage.by_state:
        steps = anchor_state_advantages(episodes, rule.norm_adv_by_std)
        call_advantages = add_to_calls(advantages.tolist(), call_advantages, steps, settings.step_advantage_coef)

    # Rewards are compared before the KL estimate is subtracted, because its noise makes all of them differ. Dynamic
    # sampling compares them before any shaping.
    signal = _signal(rule, episodes, torch.zeros_like(raw) if rule.dynamic_sampling else punished - raw, parts)
    if rule.dynamic_sampling:
        advantages = torch.where(signal, advantages, 0.0)
    distillation = config.trainer_common.distillation
    if distillation.teacher is not None:
        # The teacher has something to say about the tokens of every episode.
        signal = torch.ones_like(signal)
        advantages = advantages * distillation.reward_coef
        call_advantages = [
            {call: value * distillation.reward_coef for call, value in by_call.items()} for by_call in call_advantages
        ]
    left_out: set[int] = set()
    for index, episode in enumerate(episodes if settings.mask_truncated_answers else ()):
        trained = {span.call_id for sample in episode.samples for span in sample.spans}
        if any(call.finish_reason == "length" and call.call_id in trained for call in episode.calls):
            left_out.add(index)
    result = StepAdvantages(episodes, rule, rewards, advantages, call_advantages, signal, frozenset(left_out))
    if not all(map(math.isfinite, result.extremes)):
        raise BackboneError(f"the advantages of a step are not finite, so it has no update: {result.explain_failure()}")
    return result


def tasks_with_signal(config: AstunerConfig, algorithm: Algorithm, episodes: Sequence[Episode]) -> set[str]:
    """Return the ids of the tasks that dynamic sampling keeps.

    With a teacher, these are all tasks. Otherwise, they are those whose episodes do not all have the same reward.

    Args:
        algorithm: the resolved algorithm; it must have a rule.
        episodes: episodes with a reward and samples.
    """
    rule, weights = algorithm.rule, config.trainer_common.algorithm.component_weights
    assert rule is not None
    if config.trainer_common.distillation.teacher is not None:
        return {episode.task.task_id for episode in episodes}
    if not episodes:
        return set()
    parts = reward_components(episodes, weights) if rule.advantage.by_component else None
    signal = _signal(rule, episodes, torch.zeros(len(episodes)), parts).tolist()
    return {episode.task.task_id for episode, differs in zip(episodes, signal, strict=True) if differs}


def _signal(
    rule: ReinforcementRule, episodes: Sequence[Episode], shaping: Tensor, parts: RewardComponents | None
) -> Tensor:
    """Return, for each episode, whether the rewards that it is compared with differ, [E] bool.

    Args:
        episodes: E episodes with rewards.
        shaping: [E] float32, added to the rewards before they are compared.
        parts: the components of the rewards, if the algorithm compares those.
    """
    raw = torch.tensor([episode.reward for episode in episodes], dtype=torch.float32)
    group_ids = _group_ids(episodes)
    peers = group_ids if rule.advantage.compares_group else torch.zeros_like(group_ids)
    by_call = advantages_by_call(rule, episodes, shaping, group_ids, _lengths(episodes))
    by_step = (
        anchor_state_advantages(episodes, rule.norm_adv_by_std) if rule.advantage.by_state else [{}] * len(episodes)
    )
    calls_differ = torch.tensor(
        [float(any(own.values()) or any(steps.values())) for own, steps in zip(by_call, by_step, strict=True)]
    )
    own_signal = has_signal(raw + shaping, peers)
    if parts is not None:
        own_signal = parts.have_signal(group_ids) | has_signal(shaping, peers)
    return own_signal | (torch.zeros_like(calls_differ).index_add(0, peers, calls_differ)[peers] > 0)


def _group_ids(episodes: Sequence[Episode]) -> Tensor:
    """Return [E] int64, equal for the episodes of one task."""
    index_of_task: dict[str, int] = {}
    return torch.tensor([index_of_task.setdefault(e.task.task_id, len(index_of_task)) for e in episodes])


def _lengths(episodes: Sequence[Episode]) -> Tensor:
    """Return [E] int64, the numbers of trained tokens."""
    return torch.tensor([sum(sum(sample.train_counts) for sample in episode.samples) for episode in episodes])


def uses_kl_loss(config: AstunerConfig) -> bool:
    """Return whether the loss has a KL term to the starting model."""
    return config.trainer_common.use_kl_loss and config.trainer_common.kl_loss_coef > 0


def trains_without_advantage(config: AstunerConfig) -> bool:
    """Return whether rows with advantage 0 have a gradient, from the KL term or the entropy bonus."""
    return uses_kl_loss(config) or config.trainer_common.algorithm.entropy_coef > 0


def has_gradient(config: AstunerConfig, rows: Sequence[TrainingRow]) -> bool:
    """Return whether the loss of a mini-batch has a gradient."""
    return trains_without_advantage(config) or any(row.has_advantage for row in rows)


def shuffle_seed(config: AstunerConfig, step: int) -> str:
    """Return the seed that shuffles a step's mini-batches."""
    return f"{config.trainer_common.seed}|mini-batches|{step}"


def check_logprob_gap(
    difference: float, dtype: torch.dtype, when: str, samples: Iterable[TokenPairs] = (), earlier: Sequence[float] = ()
) -> None:
    """Check that the engine samples with the trained weights.

    Args:
        difference: mean absolute difference between the sampler's and the trainer's logprobs, nats a token.
        dtype: the dtype that the model computes in.
        when: the moment of the check, for the message.
        samples: the logprobs of each sample, from which the cause is derived; read only if the check fails.
        earlier: this difference in earlier steps.

    Raises:
        LogprobGapError: the difference is too large to be rounding, or NaN.
    """
    limit = MAX_LOGPROB_DIFFERENCE[dtype]
    if not difference <= limit:
        cause = through_door("diagnostics", "logprob_gap")(samples, difference, earlier=earlier)
        raise LogprobGapError(f"{when}: {cause.text} (rounding explains at most {limit})", cause.fix)
