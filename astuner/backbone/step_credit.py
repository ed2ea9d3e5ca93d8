"""What a training step learns from its episodes, the same for every trainer: rewards, advantages, signal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from astuner.backbone.algorithms import (
    Algorithm,
    ReinforcementRule,
    has_signal,
    overlong_punishment,
    rewards_with_kl,
)
from astuner.backbone.credit import call_advantages
from astuner.backbone.rows import Row
from astuner.backbone.sample_updates import SampleKey, sample_updates
from astuner.config.consistency import GROUP_ALGORITHMS
from astuner.config.root import AstunerConfig
from astuner.errors import BackboneError
from astuner.run_record import SampleUpdate
from astuner.schema import Episode

# Engine and trainer hold the same weights when a step begins, so their logprobs agree but for rounding
# (1e-5 in float32, some hundredths in bfloat16). A larger mean difference means that weights did not arrive.
_MOST_LOGPROB_DIFFERENCE = {torch.float32: 1e-2, torch.bfloat16: 0.3}


@dataclass(frozen=True)
class UpdateResult:
    """What a training step did.

    Attributes:
        metrics: by name.
        advantages: one an episode, in the order given.
        signal: whether any rewards that are compared with each other differed.
        samples: how the samples of each episode were trained.
    """

    metrics: dict[str, float]
    advantages: tuple[float, ...]
    signal: bool
    samples: tuple[tuple[SampleUpdate, ...], ...] = ()


@dataclass(frozen=True)
class StepCredit:
    """The credit of a step's E episodes.

    Attributes:
        episodes: those that have a reward and samples.
        rule: of the algorithm.
        rewards: [E] float32, shaped.
        advantages: [E] float32.
        own: the advantages of calls that are rewarded apart from their episode, by call id, one mapping an episode.
        signal: [E] bool, whether the rewards that an episode is compared with differ.
    """

    episodes: Sequence[Episode]
    rule: ReinforcementRule
    rewards: Tensor
    advantages: Tensor
    own: Sequence[Mapping[str, float]]
    signal: Tensor

    def takes(self, row: Row) -> bool:
        """Whether the algorithm trains a row: some leave out groups without signal."""
        return not self.rule.dynamic_sampling or bool(self.signal[row.episode])

    def given_to(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows that the algorithm trains, with their advantages."""
        return [
            row.with_advantages(float(self.advantages[row.episode]), self.own[row.episode])
            for row in rows
            if self.takes(row)
        ]

    def result(
        self,
        moved: Mapping[str, float],
        rows: Sequence[Row],
        logprobs: Mapping[SampleKey, tuple[float, ...]] | None = None,
    ) -> UpdateResult:
        """Return what the step did.

        Args:
            moved: the metrics of its update.
            rows: those that it trained, as `given_to` returns them.
            logprobs: of the trained tokens of each sample, where the update has kept them.
        """
        metrics = {
            "reward/shaped": float(self.rewards.mean()),
            "update/groups_without_variance": self._groups_without_signal(),
        }
        samples = sample_updates(self.episodes, rows, logprobs or {})
        return UpdateResult(metrics | dict(moved), tuple(self.advantages.tolist()), bool(self.signal.any()), samples)

    def _groups_without_signal(self) -> float:
        by_task: dict[str, bool] = defaultdict(bool)
        for episode, has in zip(self.episodes, self.signal.tolist(), strict=True):
            by_task[episode.task.task_id] |= has
        return sum(not has for has in by_task.values()) / max(len(by_task), 1)


def step_credit(
    config: AstunerConfig, algorithm: Algorithm, episodes: Sequence[Episode], kl_sums: Tensor | None
) -> StepCredit:
    """Return the credit of episodes that have a reward and samples; groups are the episodes of one task.

    Rewards count as different before the KL estimate, whose noise makes all of them so, is taken off; where the
    algorithm leaves groups out, before any shaping.

    Args:
        config: the run's.
        algorithm: resolved; it has a rule.
        episodes: E of them.
        kl_sums: [E] float, the KL estimate of each episode; None without a KL in the reward.
    """
    rule = algorithm.rule
    assert rule is not None
    raw = torch.tensor([episode.reward for episode in episodes], dtype=torch.float32)
    settings = config.trainer_common.algorithm
    lengths = torch.tensor([_response_length(episode) for episode in episodes])
    rewards = scored = raw + overlong_punishment(
        lengths, config.data.max_response_length, settings.overlong_buffer_length
    )
    if kl_sums is not None:
        rewards = rewards_with_kl(rewards, kl_sums, settings.kl_coef)
    groups = {task_id: index for index, task_id in enumerate(dict.fromkeys(e.task.task_id for e in episodes))}
    group_ids = torch.tensor([groups[episode.task.task_id] for episode in episodes])
    advantages = rule.advantages(rewards, group_ids)
    own = call_advantages(rule.advantages, episodes, rewards - raw, group_ids)
    compared = raw if rule.dynamic_sampling else scored
    peers = group_ids if algorithm.name in GROUP_ALGORITHMS else torch.zeros_like(group_ids)
    told_apart = call_advantages(rule.advantages, episodes, compared - raw, group_ids)
    differs = torch.tensor([float(any(found.values())) for found in told_apart])
    in_group = torch.zeros_like(differs).index_add(0, peers, differs)[peers] > 0
    signal = has_signal(compared, peers) | in_group
    if rule.dynamic_sampling:
        advantages = torch.where(signal, advantages, 0.0)
    return StepCredit(episodes, rule, rewards, advantages, own, signal)


def uses_kl_loss(config: AstunerConfig) -> bool:
    """Whether the loss has a KL to the starting model."""
    return config.trainer_common.use_kl_loss and config.trainer_common.kl_loss_coef > 0


def teaches(config: AstunerConfig, rows: Sequence[Row]) -> bool:
    """Whether a mini-batch has any gradient: all its episodes may belong to groups without variance."""
    return uses_kl_loss(config) or any(row.has_advantage for row in rows)


def shuffle_seed(config: AstunerConfig, step: int) -> str:
    """Return what a step's mini-batches are shuffled by."""
    return f"{config.trainer_common.seed}|mini-batches|{step}"


def refuse_foreign_logprobs(difference: float, dtype: torch.dtype, when: str) -> None:
    """Stop a run whose engine does not sample with the trained weights.

    Args:
        difference: mean absolute difference of the sampler's and the trainer's logprobs, nats a token.
        dtype: what the model computes in.
        when: names the moment.

    Raises:
        BackboneError: it is more than rounding.
    """
    most = _MOST_LOGPROB_DIFFERENCE[dtype]
    if not difference <= most:  # NaN is no agreement
        raise BackboneError(
            f"{when}: logprobs of the rollout and of the trainer differ by {difference:.3g} nats a token on "
            f"average (at most {most} can be rounding): the engine did not sample with the trained weights, or "
            "sampled in another precision"
        )


def _response_length(episode: Episode) -> int:
    """Return the tokens that follow a timeline's first prompt, for the longest of the episode's timelines."""
    return max(len(sample.token_ids) - min(span.start for span in sample.spans) for sample in episode.samples)
