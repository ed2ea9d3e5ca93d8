"""Policy-gradient algorithms and supervised training as pure PyTorch functions: no model, no I/O.

With `algorithm = resolve(config)` and `rule = algorithm.rule`, a trainer does the following in a training step:

1.  Shape the rewards of all episodes: `overlong_punishment`, `token_kl` → `episode_sums` → `rewards_with_kl`.
2.  Compute `rule.advantages(rewards, group_ids)` over all episodes of the step; for an algorithm that normalises each
    component of the reward separately, `group_decoupled_advantages` of the components.
3.  For each mini-batch (one optimizer step; the samples of an episode stay together), compute `sample_scales` over all
    its samples.
4.  For each micro-batch of the mini-batch, compute `rule.policy_loss(PolicyBatch(…))` and `token_weights`, and
    back-propagate the sum of token losses × weights. The gradients of the micro-batches add up to that of the loss.

Supervised training has no `rule`: in steps 3 and 4, `sft_token_weights` replaces the train counts and
`cross_entropy_losses` replaces the policy loss.
"""

from astuner.algorithms.advantages import (
    batch_normalised_advantages,
    call_reward_std,
    group_centred_advantages,
    group_decoupled_advantages,
    group_relative_advantages,
    has_signal,
    leave_one_out_advantages,
    length_weighted_advantages,
    mean_normalised_advantages,
)
from astuner.algorithms.aggregate import sample_scales, token_weights
from astuner.algorithms.entropy import differentiable_entropy, entropy_from_logprobs, high_entropy_threshold
from astuner.algorithms.kl import token_kl
from astuner.algorithms.loss_metrics import LossMetrics
from astuner.algorithms.policy_batch import NO_CLIP, CallTable, ClipRange, PolicyBatch, PolicyLoss
from astuner.algorithms.policy_loss import (
    clipped_surrogate_loss,
    clipped_weight_loss,
    geometric_mean_loss,
    reinforce_loss,
    sequence_clipped_loss,
    soft_gate_loss,
    token_sequence_clipped_loss,
)
from astuner.algorithms.registry import Algorithm, ReinforcementRule, resolve
from astuner.algorithms.reward_shaping import (
    episode_sums,
    overlong_punishment,
    rewards_with_kl,
)
from astuner.algorithms.sft import cross_entropy_losses, sft_token_weights

__all__ = [
    "NO_CLIP",
    "Algorithm",
    "CallTable",
    "ClipRange",
    "LossMetrics",
    "PolicyBatch",
    "PolicyLoss",
    "ReinforcementRule",
    "batch_normalised_advantages",
    "call_reward_std",
    "clipped_surrogate_loss",
    "clipped_weight_loss",
    "cross_entropy_losses",
    "differentiable_entropy",
    "entropy_from_logprobs",
    "episode_sums",
    "geometric_mean_loss",
    "group_centred_advantages",
    "group_decoupled_advantages",
    "group_relative_advantages",
    "has_signal",
    "high_entropy_threshold",
    "leave_one_out_advantages",
    "length_weighted_advantages",
    "mean_normalised_advantages",
    "overlong_punishment",
    "reinforce_loss",
    "resolve",
    "rewards_with_kl",
    "sample_scales",
    "sequence_clipped_loss",
    "sft_token_weights",
    "soft_gate_loss",
    "token_kl",
    "token_sequence_clipped_loss",
    "token_weights",
]
