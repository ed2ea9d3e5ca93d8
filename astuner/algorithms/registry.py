"""The configured algorithm, with the values that its paper states where the configuration has null."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from astuner.algorithms import advantages, policy_loss
from astuner.algorithms.policy_batch import NO_CLIP, ClipRange, PolicyBatch, PolicyLoss
from astuner.config.algorithm_settings import AlgorithmConfig
from astuner.config.algorithms import ALGORITHMS, AdvantageSpec, AlgorithmName, LossAggMode, ReinforcementSpec

AdvantageFunction = Callable[..., Tensor]
LossFunction = Callable[[PolicyBatch, ClipRange], PolicyLoss]


@dataclass(frozen=True, slots=True)
class ReinforcementRule:
    """The advantage estimator and the policy loss of an algorithm.

    Attributes:
        advantage: the advantage estimator.
        loss_function: maps a `PolicyBatch` and a `ClipRange` to a `PolicyLoss`.
        clip: bounds of the probability ratio; `NO_CLIP` if the algorithm has none.
        norm_adv_by_std: whether advantages are divided by a standard deviation.
        dynamic_sampling: whether groups without reward variance are left out (see `has_signal`).
    """

    advantage: AdvantageSpec
    loss_function: LossFunction
    clip: ClipRange
    norm_adv_by_std: bool
    dynamic_sampling: bool

    def advantages(
        self, rewards: Tensor, group_ids: Tensor, lengths: Tensor | None = None, *, by_std: bool | None = None
    ) -> Tensor:
        """Return the advantage of each episode.

        Args:
            rewards: [E] float, after reward shaping, for ALL episodes of the training step.
            group_ids: [E] int64, equal for the episodes of one task.
            lengths: [E] int64, the numbers of trained tokens; None for equal lengths.
            by_std: replaces `norm_adv_by_std`; None for no replacement.

        Returns:
            [E] float32.
        """
        divides = self.norm_adv_by_std if by_std is None else by_std
        estimate: AdvantageFunction = getattr(advantages, self.advantage.function)
        return estimate(rewards, group_ids, divides, *((lengths,) if self.advantage.by_length else ()))

    def policy_loss(self, batch: PolicyBatch) -> PolicyLoss:
        """Return the token losses and metrics of one micro-batch."""
        return self.loss_function(batch, self.clip)


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A configured algorithm.

    Attributes:
        loss_agg_mode: how token losses become one number (see `aggregate`).
        rule: rewards to policy loss; None for supervised training.
    """

    name: AlgorithmName
    loss_agg_mode: LossAggMode
    rule: ReinforcementRule | None


def resolve(config: AlgorithmConfig) -> Algorithm:
    """Return the configured algorithm; keys that are null take the values of its paper."""
    spec = ALGORITHMS[config.adv_estimator]
    rule = None if spec.reinforcement is None else _rule(spec.reinforcement, config)
    return Algorithm(config.adv_estimator, config.loss_agg_mode or spec.loss_agg_mode, rule)


def _rule(spec: ReinforcementSpec, config: AlgorithmConfig) -> ReinforcementRule:
    low, high = (NO_CLIP.low, NO_CLIP.high) if spec.clip is None else spec.clip
    return ReinforcementRule(
        advantage=spec.advantage,
        loss_function=getattr(policy_loss, spec.loss.function),
        clip=ClipRange(
            low if config.clip_ratio_low is None else config.clip_ratio_low,
            high if config.clip_ratio_high is None else config.clip_ratio_high,
            config.clip_ratio_dual,
        ),
        norm_adv_by_std=spec.norm_adv_by_std if config.norm_adv_by_std is None else config.norm_adv_by_std,
        dynamic_sampling=(config.dynamic_sampling or spec.dynamic_sampling) != "none",
    )
