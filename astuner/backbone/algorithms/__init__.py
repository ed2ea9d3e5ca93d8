"""Policy-gradient algorithms and supervised training as pure PyTorch functions: no model, no I/O.

For one training step a trainer, with `algorithm = resolve(config)` and `rule = algorithm.rule`:

1.  shapes the rewards of all episodes: `overlong_punishment`, `token_kl` → `episode_sums` → `rewards_with_kl`;
2.  computes `rule.advantages(rewards, group_ids)` over all episodes of the step;
3.  for each mini-batch (one optimiser step; the samples of an episode stay together) computes `sample_scales`
    over all its samples;
4.  for each micro-batch of it computes `rule.policy_loss(PolicyBatch(…))` and `token_weights`, and
    back-propagates the sum of token losses × weights: the micro-batches' gradients add up to the loss's.

Supervised training has no `rule`: `sft_token_mask` stands for the loss mask and `cross_entropy_losses` for
the policy loss in steps 3 and 4.
"""

from astuner.backbone.algorithms.advantages import (
    batch_normalised_advantages,
    group_relative_advantages,
    has_signal,
    leave_one_out_advantages,
)
from astuner.backbone.algorithms.aggregate import LossAggMode, sample_scales, token_weights
from astuner.backbone.algorithms.entropy import entropy_from_logprobs
from astuner.backbone.algorithms.kl import token_kl
from astuner.backbone.algorithms.loss_metrics import LossMetrics
from astuner.backbone.algorithms.policy_loss import (
    NO_CLIP,
    CallTable,
    ClipRange,
    PolicyBatch,
    PolicyLoss,
    clipped_surrogate_loss,
    clipped_weight_loss,
    reinforce_loss,
    sequence_clipped_loss,
)
from astuner.backbone.algorithms.registry import ALGORITHMS, Algorithm, ReinforcementRule, resolve
from astuner.backbone.algorithms.reward_shaping import (
    episode_sums,
    overlong_punishment,
    rewards_with_kl,
)
from astuner.backbone.algorithms.sft import cross_entropy_losses, sft_token_mask

__all__ = [
    "ALGORITHMS",
    "NO_CLIP",
    "Algorithm",
    "CallTable",
    "ClipRange",
    "LossAggMode",
    "LossMetrics",
    "PolicyBatch",
    "PolicyLoss",
    "ReinforcementRule",
    "batch_normalised_advantages",
    "clipped_surrogate_loss",
    "clipped_weight_loss",
    "cross_entropy_losses",
    "entropy_from_logprobs",
    "episode_sums",
    "group_relative_advantages",
    "has_signal",
    "leave_one_out_advantages",
    "overlong_punishment",
    "reinforce_loss",
    "resolve",
    "rewards_with_kl",
    "sample_scales",
    "sequence_clipped_loss",
    "sft_token_mask",
    "token_kl",
    "token_weights",
]
