"""Token losses of the policy-gradient algorithms.

Notation: r = π(token) / π_old(token), the ratio of a token's probability under the policy to that under the
policy that sampled it; A, the advantage of the token's call. All functions take a `PolicyBatch` and a
`ClipRange` and return a `PolicyLoss`, whose token losses are to be multiplied with `aggregate.token_weights`
and summed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from astuner.backbone.algorithms.kl import LOG_RATIO_LIMIT
from astuner.backbone.algorithms.loss_metrics import LossMetrics
from astuner.errors import BackboneError


@dataclass(frozen=True, slots=True)
class ClipRange:
    """Ratios are clipped to [1 - low, 1 + high]; `low` of 1 or more sets no lower bound, as ratios are positive."""

    low: float
    high: float

    def __call__(self, ratio: Tensor) -> Tensor:
        """Return `ratio` cut to the range; the gradient outside it is zero."""
        return ratio.clamp(1 - self.low, 1 + self.high)


NO_CLIP = ClipRange(low=math.inf, high=math.inf)


@dataclass(frozen=True, slots=True)
class CallTable:
    """The LLM calls trained in a micro-batch, for losses whose unit is a call.

    Call c's completion is `[rows[c], starts[c]:ends[c]]` of the [B, T] tensors: the `spans` of
    `astuner.schema.Sample`. Each stands whole in one row; calls of a row may overlap, which
    is why this is a table and not one id a token.

    Attributes:
        rows, starts, ends: [C] int64, with starts < ends.
    """

    rows: Tensor
    starts: Tensor
    ends: Tensor


@dataclass(frozen=True, slots=True)
class PolicyBatch:
    """One micro-batch, padded.

    Attributes:
        logprobs: [B, T] float: `logprobs[b, t]` is log π of token t given the tokens before it; finite.
        old_logprobs: [B, T] float, the same under the policy that sampled; not looked at where `loss_mask` is 0.
        advantages: [B, T] float: of the call that each token belongs to; not looked at where `loss_mask` is 0.
        loss_mask: [B, T] int64: how often each token was sampled and is trained here; 0 for context and padding.
        calls: needed by `sequence_clipped_loss` only.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    loss_mask: Tensor
    calls: CallTable | None = None

    def log_ratio(self) -> Tensor:
        """Return log r, [B, T], 0 where nothing is trained, cut to ± `LOG_RATIO_LIMIT`."""
        difference = (self.logprobs - self.old_logprobs.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        return self.only_trained(difference)

    def only_trained(self, values: Tensor) -> Tensor:
        """Return `values`, [B, T], with 0 where nothing is trained."""
        return torch.where(self.loss_mask > 0, values, torch.zeros_like(values))

    def token_advantages(self) -> Tensor:
        """Return the advantages, [B, T], without gradient, in the dtype of the logprobs."""
        return self.advantages.detach().to(self.logprobs.dtype)


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """What a loss function returns.

    Attributes:
        token_losses: [B, T] in the dtype of the logprobs, 0 where `loss_mask` is 0.
        metrics: of this micro-batch, to be added to those of the others.
    """

    token_losses: Tensor
    metrics: LossMetrics


def clipped_surrogate_loss(batch: PolicyBatch, clip: ClipRange) -> PolicyLoss:
    """Return -min(r A, clip(r) A) at each token.

    PPO (arXiv:1707.06347, eq. 7) as GRPO (arXiv:2402.03300, eq. 3), Dr. GRPO (arXiv:2503.20783, section 3.2),
    DAPO (arXiv:2503.14476, eq. 8 and 10) and REINFORCE++ (arXiv:2501.03262v9) have it. Where the clipped term
    is the smaller one, the token's gradient is zero.
    """
    log_ratio = batch.log_ratio()
    ratio = log_ratio.exp()
    advantages = batch.token_advantages()
    losses = batch.only_trained(_surrogate(ratio, advantages, clip))
    metrics = LossMetrics.of(
        ratio=ratio,
        weight=batch.loss_mask,
        clipped_low=(ratio < 1 - clip.low) & (advantages < 0),
        clipped_high=(ratio > 1 + clip.high) & (advantages > 0),
        token_log_ratio=log_ratio,
        loss_mask=batch.loss_mask,
    )
    return PolicyLoss(losses, metrics)


def sequence_clipped_loss(batch: PolicyBatch, clip: ClipRange) -> PolicyLoss:
    """Return -min(s A, clip(s) A) at each token, with s the length-normalised ratio of the token's call.

    GSPO (arXiv:2507.18071, eq. 5 and 7): s = (π(y) / π_old(y))^(1 / |y|), the geometric mean of the ratios of
    the tokens of y, so that all tokens of a call are clipped together and have the same gradient. The
    sequence y is the completion of one LLM call; in an episode of one call this is the paper's response.
    A token that several calls share gets the mean of their losses, so that times `loss_mask` it is their sum.

    Raises:
        BackboneError: `batch.calls` is missing, or does not cover the trained tokens as often as `loss_mask`
            counts them.
    """
    calls = _required_calls(batch)
    shape = batch.loss_mask.shape
    lengths = calls.ends - calls.starts
    places, call_of = _call_tokens(calls, lengths, width=shape[1])
    _check_cover(batch.loss_mask, places)

    log_ratio = batch.log_ratio()
    per_call = log_ratio.new_zeros(lengths.numel()).index_add(0, call_of, log_ratio.flatten()[places])
    ratio = (per_call / lengths).exp()
    advantages = batch.token_advantages()[calls.rows, calls.starts]
    call_losses = _surrogate(ratio, advantages, clip)
    sums = call_losses.new_zeros(shape.numel()).index_add(0, places, call_losses[call_of]).view(shape)
    metrics = LossMetrics.of(
        ratio=ratio,
        weight=lengths,
        clipped_low=(ratio < 1 - clip.low) & (advantages < 0),
        clipped_high=(ratio > 1 + clip.high) & (advantages > 0),
        token_log_ratio=log_ratio,
        loss_mask=batch.loss_mask,
    )
    return PolicyLoss(sums / batch.loss_mask.clamp(min=1), metrics)


def clipped_weight_loss(batch: PolicyBatch, clip: ClipRange) -> PolicyLoss:
    """Return -sg(clip(r)) A log π at each token, sg being the stop-gradient.

    CISPO (MiniMax-M1, arXiv:2506.13585, eq. 4 and 5): the importance weight is clipped, not the update, so
    that no token loses its gradient.
    """
    log_ratio = batch.log_ratio().detach()
    ratio = log_ratio.exp()
    losses = batch.only_trained(-clip(ratio) * batch.token_advantages() * batch.logprobs)
    metrics = LossMetrics.of(
        ratio=ratio,
        weight=batch.loss_mask,
        clipped_low=ratio < 1 - clip.low,
        clipped_high=ratio > 1 + clip.high,
        token_log_ratio=log_ratio,
        loss_mask=batch.loss_mask,
    )
    return PolicyLoss(losses, metrics)


def reinforce_loss(batch: PolicyBatch, clip: ClipRange) -> PolicyLoss:
    """Return -A log π at each token; there is no ratio, so `clip` must be `NO_CLIP`.

    REINFORCE, as RLOO (arXiv:2402.14740) uses it. Its gradient is right for tokens sampled from the policy
    itself: with several optimiser steps a training step (`mini_batch_num`), all but the first are off-policy
    and uncorrected.
    """
    assert clip == NO_CLIP, clip
    log_ratio = batch.log_ratio().detach()
    nothing = torch.zeros_like(batch.loss_mask, dtype=torch.bool)
    metrics = LossMetrics.of(
        ratio=log_ratio.exp(),
        weight=batch.loss_mask,
        clipped_low=nothing,
        clipped_high=nothing,
        token_log_ratio=log_ratio,
        loss_mask=batch.loss_mask,
    )
    return PolicyLoss(batch.only_trained(-batch.token_advantages() * batch.logprobs), metrics)


def _surrogate(ratio: Tensor, advantages: Tensor, clip: ClipRange) -> Tensor:
    return -torch.minimum(ratio * advantages, clip(ratio) * advantages)


def _required_calls(batch: PolicyBatch) -> CallTable:
    if batch.calls is None:
        raise BackboneError("gspo needs the calls of the micro-batch: fill PolicyBatch.calls")
    return batch.calls


def _call_tokens(calls: CallTable, lengths: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return, for every token of every call, its place in the flattened [B × T] and the call it belongs to."""
    call_of = torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths)
    first_of_call = lengths.cumsum(0) - lengths
    offset = torch.arange(call_of.numel(), device=lengths.device) - first_of_call[call_of]
    return calls.rows[call_of] * width + calls.starts[call_of] + offset, call_of


def _check_cover(loss_mask: Tensor, places: Tensor) -> None:
    flat = loss_mask.flatten()
    covered = torch.zeros_like(flat).index_add(0, places, torch.ones_like(places, dtype=flat.dtype))
    wrong = int((covered != flat).sum())
    if wrong:
        raise BackboneError(
            f"the calls of PolicyBatch.calls do not match its loss_mask at {wrong} tokens: each token must lie "
            "in as many calls as loss_mask counts; give the trained spans of these samples, and no others"
        )
