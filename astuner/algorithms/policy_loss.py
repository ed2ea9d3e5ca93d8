"""Token losses of the policy-gradient algorithms.

Notation: r = π(token) / π_old(token) is the ratio of a token's probability under the policy to that under the policy
that sampled it; A is the advantage of the token's call. All functions map a `PolicyBatch` and a `ClipRange` to a
`PolicyLoss`. The loss of the batch is the sum of its token losses × `aggregate.token_weights`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from astuner.algorithms.kl import LOG_RATIO_LIMIT
from astuner.algorithms.loss_metrics import LossMetrics
from astuner.errors import BackboneError


@dataclass(frozen=True, slots=True)
class ClipRange:
    """The range [1 - low, 1 + high] of clipped ratios; with `low` of 1 or more there is no lower bound."""

    low: float
    high: float

    def __call__(self, ratio: Tensor) -> Tensor:
        """Return `ratio` clipped to the range; its gradient outside the range is zero."""
        return ratio.clamp(1 - self.low, 1 + self.high)


NO_CLIP = ClipRange(low=math.inf, high=math.inf)


@dataclass(frozen=True, slots=True)
class CallTable:
    """The LLM calls trained in a micro-batch, for losses whose unit is a call.

    The completion of call c is `[rows[c], starts[c]:ends[c]]` of the [B, T] tensors (see
    `astuner.schema.Sample.spans`). A completion lies within one row. Calls of a row may overlap, so a token can belong
    to several calls.

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
        logprobs: [B, T] float, finite; `logprobs[b, t]` is log π of token t given the tokens before it.
        old_logprobs: [B, T] float, the same under the policy that sampled; ignored where `train_counts` is 0.
        advantages: [B, T] float, the advantage of each token's call; ignored where `train_counts` is 0.
        train_counts: [B, T] int64, how often each token was sampled and is trained; 0 for context and padding.
        calls: the calls; needed only by `sequence_clipped_loss`.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    train_counts: Tensor
    calls: CallTable | None = None

    def log_ratio(self) -> Tensor:
        """Return log r, [B, T], clipped to ± `LOG_RATIO_LIMIT`, and 0 for tokens that are not trained."""
        difference = (self.logprobs - self.old_logprobs.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        return self.only_trained(difference)

    def only_trained(self, values: Tensor) -> Tensor:
        """Return `values`, [B, T], with 0 for tokens that are not trained."""
        return torch.where(self.train_counts > 0, values, torch.zeros_like(values))

    def token_advantages(self) -> Tensor:
        """Return the advantages, [B, T], detached, in the dtype of the logprobs."""
        return self.advantages.detach().to(self.logprobs.dtype)


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The losses of the tokens of a micro-batch.

    Attributes:
        token_losses: [B, T] in the dtype of the logprobs, 0 where `train_counts` is 0.
        metrics: the metrics of this micro-batch, which add up over micro-batches.
    """

    token_losses: Tensor
    metrics: LossMetrics


def clipped_surrogate_loss(batch: PolicyBatch, clip: ClipRange) -> PolicyLoss:
    """Return -min(r A, clip(r) A) at each token.

    This is the loss of PPO (arXiv:1707.06347, eq. 7), as used by GRPO (arXiv:2402.03300, eq. 3), Dr. GRPO
    (arXiv:2503.20783, section 3.2), DAPO (arXiv:2503.14476, eq. 8 and 10) and REINFORCE++ (arXiv:2501.03262v9). If the
    clipped term is the smaller one, the gradient of the token is zero.
    """
    log_ratio = batch.log_ratio()
    ratio = log_ratio.exp()
    advantages = batch.token_advantages()
    losses = batch.only_trained(_surrogate(ratio, advantages, clip))
    metrics = LossMetrics.of(
        ratio=ratio,
        weight=batch.train_counts,
        clipped_low=(ratio < 1 - clip.low) & (advantages < 0),
        clipped_high=(ratio > 1 + clip.high) & (advantages > 0),
        token_log_ratio=log_ratio,
        train_counts=batch.train_counts,
    )
    return PolicyLoss(losses, metrics)


def sequence_clipped_loss(batch: PolicyBatch, clip: ClipRange) -> PolicyLoss:
    """Return -min(s A, clip(s) A) at each token, where s is the length-normalised ratio of the token's call.

    GSPO (arXiv:2507.18071, eq. 5 and 7): s = (π(y) / π_old(y))^(1 / |y|), the geometric mean of the ratios of the
    tokens of y. All tokens of a call are clipped together and have the same gradient. The sequence y is the completion
    of one LLM call; in an episode with one call, this is the paper's response. A token that several calls share has the
    mean of their losses, which times `train_counts` is their sum.

    Raises:
        BackboneError: `batch.calls` is missing, or does not cover the trained tokens as often as `train_counts` states.
    """
    if batch.calls is None:
        raise BackboneError("gspo needs the calls of the micro-batch: set PolicyBatch.calls")
    calls = batch.calls
    shape = batch.train_counts.shape
    lengths = calls.ends - calls.starts
    places, call_of = _call_tokens(calls, lengths, width=shape[1])
    _check_coverage(batch.train_counts, places)

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
        train_counts=batch.train_counts,
    )
    return PolicyLoss(sums / batch.train_counts.clamp(min=1), metrics)


def clipped_weight_loss(batch: PolicyBatch, clip: ClipRange) -> PolicyLoss:
    """Return -sg(clip(r)) A log π at each token, where sg is the stop-gradient.

    CISPO (MiniMax-M1, arXiv:2506.13585, eq. 4 and 5) clips the importance weight, not the update, so that every token
    keeps its gradient.
    """
    log_ratio = batch.log_ratio().detach()
    ratio = log_ratio.exp()
    losses = batch.only_trained(-clip(ratio) * batch.token_advantages() * batch.logprobs)
    metrics = LossMetrics.of(
        ratio=ratio,
        weight=batch.train_counts,
        clipped_low=ratio < 1 - clip.low,
        clipped_high=ratio > 1 + clip.high,
        token_log_ratio=log_ratio,
        train_counts=batch.train_counts,
    )
    return PolicyLoss(losses, metrics)


def reinforce_loss(batch: PolicyBatch, clip: ClipRange) -> PolicyLoss:
    """Return -A log π at each token. There is no ratio, so `clip` must be `NO_CLIP`.

    This is REINFORCE, as used by RLOO (arXiv:2402.14740). Its gradient is correct for tokens that the current policy
    sampled. With several optimizer steps per training step (`mini_batch_num`), all steps after the first are off-policy
    and are not corrected.
    """
    assert clip == NO_CLIP, clip
    log_ratio = batch.log_ratio().detach()
    not_clipped = torch.zeros_like(batch.train_counts, dtype=torch.bool)
    metrics = LossMetrics.of(
        ratio=log_ratio.exp(),
        weight=batch.train_counts,
        clipped_low=not_clipped,
        clipped_high=not_clipped,
        token_log_ratio=log_ratio,
        train_counts=batch.train_counts,
    )
    return PolicyLoss(batch.only_trained(-batch.token_advantages() * batch.logprobs), metrics)


def _surrogate(ratio: Tensor, advantages: Tensor, clip: ClipRange) -> Tensor:
    return -torch.minimum(ratio * advantages, clip(ratio) * advantages)


def _call_tokens(calls: CallTable, lengths: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return, for every token of every call, its index in the flattened [B × T] and the index of its call."""
    call_of = torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths)
    first_of_call = lengths.cumsum(0) - lengths
    offset = torch.arange(call_of.numel(), device=lengths.device) - first_of_call[call_of]
    return calls.rows[call_of] * width + calls.starts[call_of] + offset, call_of


def _check_coverage(train_counts: Tensor, places: Tensor) -> None:
    flat = train_counts.flatten()
    covered = torch.zeros_like(flat).index_add(0, places, torch.ones_like(places, dtype=flat.dtype))
    wrong = int((covered != flat).sum())
    if wrong:
        raise BackboneError(
            f"PolicyBatch.calls do not match train_counts at {wrong} tokens: each token must lie in as many calls as "
            "its train count; pass exactly the trained spans of the samples"
        )
