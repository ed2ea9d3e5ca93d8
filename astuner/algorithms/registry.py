"""The configured algorithm, with the values that its paper states where the configuration has null."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from astuner.algorithms import advantages, policy_loss
from astuner.algorithms.policy_batch import NO_CLIP, ClipRange, PolicyBatch, PolicyLoss
from astuner.config.algorithm_settings import AlgorithmConfig
from astuner.config.algorithms import ALGORITHMS, AlgorithmName, LossAggMode, ReinforcementSpec

AdvantageFunction = Callable[..., Tensor]
LossFunction = Callable[[PolicyBatch, ClipRange], PolicyLoss]


@dataclass(frozen=True, slots=True)
class ReinforcementRule:
    """The advantage estimator and the policy loss of an algorithm.

    Attributes:
        advantage_function: maps (rewards [E], group_ids [E], by_std), and lengths [E] if `by_length`, to advantages
            [E], for the E episodes of a step.
        loss_function: maps a `PolicyBatch` and a `ClipRange` to a `PolicyLoss`.
        clip: bounds of the probability ratio; `NO_CLIP` if the algorithm has none.
        norm_adv_by_std: whether advantages are divided by a standard deviation.
        by_component: whether each component of the reward is normalised separately.
        by_length: whether advantages depend on the lengths of the episodes.
        by_state: whether steps that begin in equal states are compared, too.
        compares_group: whether rewards are compared within a group only; otherwise, with all episodes of the step.
        dynamic_sampling: whether groups without reward variance are left out (see `has_signal`).
    """

    advantage_function: AdvantageFunction
    loss_function: LossFunction
    clip: ClipRange
    norm_adv_by_std: bool
    compares_group: bool
    dynamic_sampling: bool
    by_component: bool = False
    by_length: bool = False
    by_state: bool = False

    def advantages(
        self, rewards: Tensor, group_ids: Tensor, lengths: Tensor | None = None, *, by_std: bool | None = None
    ) -> Tensor:
        """Return the advantage of each episode.

        Args:
            rewards: [E] float, after reward shaping, of ALL episodes of the training step.
            group_ids: [E] int64, equal for the episodes of one task.
            lengths: [E] int64, the numbers of trained tokens; None for equal lengths.
            by_std: replaces `norm_adv_by_std`; None for no replacement.

        Returns:
            [E] float32.
        """
        divides = self.norm_adv_by_std if by_std is None else by_std
        if self.by_length:
            return self.advantage_function(rewards, group_ids, divides, lengths)
        return self.advantage_function(rewards, group_ids, divides)

    def policy_loss(self, batch: PolicyBatch) -> PolicyLoss:
        """Return the token losses and metrics of one micro-batch."""
        return self.loss_function(batch, self.clip)


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A configured algorithm.

    Attributes:
        name: its name in the configuration.
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
        advantage_function=getattr(advantages, spec.advantage.function),
        loss_function=getattr(policy_loss, spec.loss.function),
        clip=ClipRange(
            low if config.clip_ratio_low is None else config.clip_ratio_low,
            high if config.clip_ratio_high is None else config.clip_ratio_high,
            config.clip_ratio_dual,
        ),
        norm_adv_by_std=spec.norm_adv_by_std if config.norm_adv_by_std is None else config.norm_adv_by_std,
        compares_group=spec.advantage.compares_group,
        dynamic_sampling=(config.dynamic_sampling or spec.dynamic_sampling) != "none",
        by_component=spec.advantage.by_component,
        by_length=spec.advantage.by_length,
        by_state=spec.advantage.by_state,
    )
