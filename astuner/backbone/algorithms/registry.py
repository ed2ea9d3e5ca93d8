"""The algorithms by name, and a configuration's choice with its nulls filled in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from astuner.backbone.algorithms.advantages import (
    batch_normalised_advantages,
    group_relative_advantages,
    leave_one_out_advantages,
)
from astuner.backbone.algorithms.aggregate import LossAggMode
from astuner.backbone.algorithms.policy_loss import (
    NO_CLIP,
    ClipRange,
    PolicyBatch,
    PolicyLoss,
    clipped_surrogate_loss,
    clipped_weight_loss,
    reinforce_loss,
    sequence_clipped_loss,
)
from astuner.config.trainer import AlgorithmConfig, AlgorithmName

AdvantageFunction = Callable[[Tensor, Tensor, bool], Tensor]
LossFunction = Callable[[PolicyBatch, ClipRange], PolicyLoss]


@dataclass(frozen=True, slots=True)
class ReinforcementRule:
    """How an algorithm turns rewards into a policy loss.

    Attributes:
        advantage_function: (rewards [E], group_ids [E], by_std) to advantages [E].
        loss_function: a `PolicyBatch` and a `ClipRange` to a `PolicyLoss`.
        clip: bounds of the probability ratio, `NO_CLIP` where the algorithm has none.
        norm_adv_by_std: whether advantages are divided by a standard deviation.
        dynamic_sampling: whether the paper leaves out groups without reward variance (see `has_signal`).
    """

    advantage_function: AdvantageFunction
    loss_function: LossFunction
    clip: ClipRange
    norm_adv_by_std: bool
    dynamic_sampling: bool = False

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        """Return each episode's advantage.

        Args:
            rewards: [E] float, after reward shaping, of ALL episodes of the training step.
            group_ids: [E] int64, equal for the episodes of one task.

        Returns:
            [E] float32.
        """
        return self.advantage_function(rewards, group_ids, self.norm_adv_by_std)

    def policy_loss(self, batch: PolicyBatch) -> PolicyLoss:
        """Return the token losses and metrics of one micro-batch."""
        return self.loss_function(batch, self.clip)


@dataclass(frozen=True, slots=True)
class Algorithm:
    """An algorithm: as its paper has it in `ALGORITHMS`, as configured from `resolve`.

    Attributes:
        name: as in the configuration.
        citation: where it is from; where a default is not the paper's, where that is from.
        loss_agg_mode: how token losses become one number (see `aggregate`).
        rule: rewards to policy loss; None for supervised training, which has neither.
    """

    name: AlgorithmName
    citation: str
    loss_agg_mode: LossAggMode
    rule: ReinforcementRule | None


# PPO's value (arXiv:1707.06347, section 6.1), for the papers that build on PPO's loss and state none.
_PPO_CLIP = ClipRange(low=0.2, high=0.2)

_GRPO = ReinforcementRule(group_relative_advantages, clipped_surrogate_loss, _PPO_CLIP, norm_adv_by_std=True)

ALGORITHMS: dict[str, Algorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm(
            name="grpo",
            citation="GRPO: DeepSeekMath, arXiv:2402.03300. It states no clip range; PPO's 0.2 is taken.",
            loss_agg_mode="seq-mean-token-mean",
            rule=_GRPO,
        ),
        Algorithm(
            name="dr_grpo",
            citation="Dr. GRPO: Understanding R1-Zero-Like Training, arXiv:2503.20783. PPO's clip range of 0.2.",
            loss_agg_mode="seq-mean-token-sum-norm",
            rule=replace(_GRPO, norm_adv_by_std=False),
        ),
        Algorithm(
            name="dapo",
            citation="DAPO: An Open-Source LLM Reinforcement Learning System at Scale, arXiv:2503.14476.",
            loss_agg_mode="token-mean",
            rule=replace(_GRPO, clip=ClipRange(low=0.2, high=0.28), dynamic_sampling=True),
        ),
        Algorithm(
            name="rloo",
            citation="RLOO: Back to Basics, arXiv:2402.14740. Its sum over a response's tokens is divided by "
            "max_response_length here, a constant.",
            loss_agg_mode="seq-mean-token-sum-norm",
            rule=ReinforcementRule(leave_one_out_advantages, reinforce_loss, NO_CLIP, norm_adv_by_std=False),
        ),
        Algorithm(
            name="reinforce++",
            citation="REINFORCE++, arXiv:2501.03262v9, the variant without a group baseline. PPO's clip range of "
            "0.2 and mean over time steps.",
            loss_agg_mode="token-mean",
            rule=replace(_GRPO, advantage_function=batch_normalised_advantages),
        ),
        Algorithm(
            name="gspo",
            citation="GSPO: Group Sequence Policy Optimization, arXiv:2507.18071.",
            loss_agg_mode="seq-mean-token-mean",
            rule=replace(_GRPO, loss_function=sequence_clipped_loss, clip=ClipRange(low=3e-4, high=4e-4)),
        ),
        Algorithm(
            name="cispo",
            citation="CISPO: MiniMax-M1, arXiv:2506.13585. No lower bound, as there; it states no upper bound, so "
            "weights are cut at 5, after ScaleRL, arXiv:2510.13786.",
            loss_agg_mode="token-mean",
            rule=replace(_GRPO, loss_function=clipped_weight_loss, clip=ClipRange(low=1.0, high=4.0)),
        ),
        Algorithm(
            name="sft",
            citation="Supervised fine-tuning: token-level cross entropy; weight of the prompt after arXiv:2401.13586.",
            loss_agg_mode="token-mean",
            rule=None,
        ),
    )
}


def resolve(config: AlgorithmConfig) -> Algorithm:
    """Return the configured algorithm, nulls filled in with its paper's values."""
    algorithm = ALGORITHMS[config.adv_estimator]
    rule = algorithm.rule
    if rule is not None:
        clip = ClipRange(
            low=rule.clip.low if config.clip_ratio_low is None else config.clip_ratio_low,
            high=rule.clip.high if config.clip_ratio_high is None else config.clip_ratio_high,
        )
        by_std = rule.norm_adv_by_std if config.norm_adv_by_std is None else config.norm_adv_by_std
        rule = replace(rule, clip=clip, norm_adv_by_std=by_std)
    return replace(algorithm, loss_agg_mode=config.loss_agg_mode or algorithm.loss_agg_mode, rule=rule)
