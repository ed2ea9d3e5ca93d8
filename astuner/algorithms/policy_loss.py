"""Token losses of the policy-gradient algorithms.

Notation: r = π(token) / π_old(token) is the ratio of a token's probability under the policy to that under the policy
before the update; A is the advantage of the token's call. All functions map a `PolicyBatch` and a `ClipRange` to a
`PolicyLoss`. The batch's loss is the sum of its token losses × `aggregate.token_weights`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from astuner.algorithms.policy_batch import NO_CLIP, ClipRange, LossMetrics, PolicyBatch, PolicyLoss


def clipped_surrogate_loss(batch: PolicyBatch, clip: ClipRange) -> PolicyLoss:
    """Return -min(r A, clip(r) A) at each token.

    This is the loss of PPO (arXiv:1707.06347, eq. 7), as used by GRPO (arXiv:2402.03300, eq. 3), Dr. GRPO
    (arXiv:2503.20783, section 3.2), DAPO (arXiv:2503.14476, eq. 8 and 10) and REINFORCE++ (arXiv:2501.03262v9). If the
    clipped term is the smaller one, the gradient of the token is zero. With a dual clip c (arXiv:1912.09729, eq. 5),
    the loss of a token with A < 0 is at most -c A, so a ratio above c has no gradient either.
    """
    log_ratio = batch.log_ratio()
    ratio = log_ratio.exp()
    advantages = batch.token_advantages()
    losses = batch.only_trained(_surrogate(ratio, advantages, clip))
    metrics = LossMetrics.of(batch, ratio, clip.clipped(ratio, advantages))
    return PolicyLoss(losses, metrics)


def sequence_clipped_loss(batch: PolicyBatch, clip: ClipRange) -> PolicyLoss:
    """Return -min(s A, clip(s) A) at each token, where s is the length-normalised ratio of the token's call.

    GSPO (arXiv:2507.18071, eq. 5 and 7): s = (π(y) / π_old(y))^(1 / |y|), the geometric mean of the ratios at y's
    tokens. All tokens of a call are clipped together and have the same gradient. The sequence y is the completion of
    one LLM call; in an episode with one call, this is the paper's response. A token that several calls share has the
    mean of their losses, which times `train_counts` is their sum.

    Raises:
        BackboneError: `batch.calls` is missing, or does not cover the trained tokens as often as `train_counts` states.
    """
    tokens = batch.call_tokens()
    assert batch.calls is not None
    log_ratio = batch.log_ratio()
    ratio = tokens.means(log_ratio).exp()
    advantages = batch.token_advantages()[batch.calls.rows, batch.calls.starts]
    losses = tokens.to_tokens(_surrogate(ratio, advantages, clip), batch.train_counts)
    metrics = LossMetrics.of(batch, ratio, clip.clipped(ratio, advantages), tokens.lengths)
    return PolicyLoss(losses, metrics)


def token_sequence_clipped_loss(batch: PolicyBatch, clip: ClipRange) -> PolicyLoss:
    """Return -min(s A, clip(s) A) at each token, where s = sg(s of the call) × r / sg(r) and sg is the stop-gradient.

    GSPO-token (arXiv:2507.18071, eq. 13 and 14): s has GSPO's value, but the token's gradient, so each token
    can have its own advantage. If all tokens in a call have the same advantage, the gradient equals that of
    `sequence_clipped_loss`.

    Raises:
        BackboneError: `batch.calls` is missing, or does not cover the trained tokens as often as `train_counts` states.
    """
    tokens = batch.call_tokens()
    log_ratio = batch.log_ratio()
    token_log_ratio = log_ratio.flatten()[tokens.places]
    sequence_ratio = tokens.means(log_ratio.detach()).exp()[tokens.call_of]
    ratio = sequence_ratio * (token_log_ratio - token_log_ratio.detach()).exp()
    advantages = batch.token_advantages().flatten()[tokens.places]
    losses = tokens.means_over_calls(_surrogate(ratio, advantages, clip), batch.train_counts)
    metrics = LossMetrics.of(batch, ratio, clip.clipped(ratio, advantages), torch.ones_like(tokens.places))
    return PolicyLoss(losses, metrics)


def geometric_mean_loss(batch: PolicyBatch, clip: ClipRange) -> PolicyLoss:
    """Return -g A at each token, where g is the geometric mean over the clipped ratios in the token's call.

    GMPO (arXiv:2507.20673, eq. 4): each token's log r is clipped to [-low, high] where that makes the objective
    smaller, and g is the exponential of the mean over the call's tokens. A token whose ratio is clipped has no
    gradient, and the other tokens of the call keep theirs. The unit is a call, as in `sequence_clipped_loss`.

    Raises:
        BackboneError: `batch.calls` is missing, or does not cover the trained tokens as often as `train_counts` states.
    """
    tokens = batch.call_tokens()
    assert batch.calls is not None
    log_ratio = batch.log_ratio()
    advantages = batch.token_advantages()
    clipped = log_ratio.clamp(-clip.low, clip.high)
    # Clipping applies where it makes r A smaller.
    limited = torch.where(advantages >= 0, torch.minimum(log_ratio, clipped), torch.maximum(log_ratio, clipped))
    call_losses = -tokens.means(limited).exp() * advantages[batch.calls.rows, batch.calls.starts]
    is_clipped = ((log_ratio < -clip.low) & (advantages < 0), (log_ratio > clip.high) & (advantages > 0))
    metrics = LossMetrics.of(batch, log_ratio.exp(), is_clipped)
    return PolicyLoss(tokens.to_tokens(call_losses, batch.train_counts), metrics)


SAPO_TEMPERATURES = (1.0, 1.05)
"""SAPO's temperatures of the gate for positive and for negative advantages (arXiv:2511.20347, section 5)."""


def soft_gate_loss(batch: PolicyBatch, clip: ClipRange) -> PolicyLoss:
    """Return -f(r) A at each token, with the gate f(r) = 4 / τ · sigmoid(τ (r - 1)).

    SAPO (arXiv:2511.20347, eq. 5 and 6) replaces clipping by a gate whose gradient decreases smoothly as r moves away
    from 1, faster for negative advantages: τ is `SAPO_TEMPERATURES`. At r = 1, the gradient is that of r A. `clip` must
    be `NO_CLIP`.
    """
    assert clip == NO_CLIP, clip
    log_ratio = batch.log_ratio()
    ratio = log_ratio.exp()
    advantages = batch.token_advantages()
    positive, negative = SAPO_TEMPERATURES
    temperature = torch.where(advantages > 0, positive, negative).to(ratio.dtype)
    gate = torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature
    metrics = LossMetrics.of(batch, ratio)
    return PolicyLoss(batch.only_trained(-gate * advantages), metrics)


def clipped_weight_loss(batch: PolicyBatch, clip: ClipRange) -> PolicyLoss:
    """Return -sg(clip(r)) A log π at each token, where sg is the stop-gradient.

    CISPO (MiniMax-M1, arXiv:2506.13585, eq. 4 and 5) clips the importance weight, not the update, so that every token
    keeps its gradient.
    """
    log_ratio = batch.log_ratio().detach()
    ratio = log_ratio.exp()
    losses = batch.only_trained(-clip(ratio) * batch.token_advantages() * batch.logprobs)
    metrics = LossMetrics.of(batch, ratio, (ratio < 1 - clip.low, ratio > 1 + clip.high))
    return PolicyLoss(losses, metrics)


def reinforce_loss(batch: PolicyBatch, clip: ClipRange) -> PolicyLoss:
    """Return -A log π at each token. There is no ratio, so `clip` must be `NO_CLIP`.

    This is REINFORCE, as used by RLOO (arXiv:2402.14740). Its gradient is correct for tokens that the current policy
    sampled. With several optimizer steps per training step (`mini_batch_num`), all steps after the first are off-policy
    and are not corrected.
    """
    assert clip == NO_CLIP, clip
    log_ratio = batch.log_ratio().detach()
    metrics = LossMetrics.of(batch, log_ratio.exp())
    return PolicyLoss(batch.only_trained(-batch.token_advantages() * batch.logprobs), metrics)


def _surrogate(ratio: Tensor, advantages: Tensor, clip: ClipRange) -> Tensor:
    """Return -min(r A, clip(r) A); with a dual clip, at most -c A where A < 0."""
    losses = -torch.minimum(ratio * advantages, clip(ratio) * advantages)
    if clip.dual is None:
        return losses
    return torch.where(advantages < 0, torch.minimum(losses, -clip.dual * advantages), losses)
