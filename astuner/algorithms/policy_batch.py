"""The inputs, the metrics and the result of a policy-gradient loss."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from astuner.algorithms.kl import LOG_RATIO_LIMIT
from astuner.errors import BackboneError


@dataclass(frozen=True, slots=True)
class ClipRange:
    """The range [1 - low, 1 + high] to which ratios are clipped; if `low` is 1 or more, there is no lower bound.

    Attributes:
        low, high: distances from 1.
        dual: the largest ratio of a token with a negative advantage (dual-clip PPO); None for no limit.
    """

    low: float
    high: float
    dual: float | None = None

    def __call__(self, ratio: Tensor) -> Tensor:
        """Return `ratio` clipped to the range; its gradient outside the range is zero."""
        return ratio.clamp(1 - self.low, 1 + self.high)

    def clipped(self, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """Return where a ratio is below and above the range, and the advantage has the sign that makes this count."""
        return (ratio < 1 - self.low) & (advantages < 0), (ratio > 1 + self.high) & (advantages > 0)


NO_CLIP = ClipRange(low=math.inf, high=math.inf)


@dataclass(frozen=True, slots=True)
class CallTable:
    """The LLM calls trained in a micro-batch, for losses whose unit is a call.

    Call c's completion is `[rows[c], starts[c]:ends[c]]` in the [B, T] tensors (see `astuner.schema.Sample.spans`). A
    completion lies within one row. Calls of a row may overlap, so a token can belong to several calls.

    Attributes:
        rows, starts, ends: [C] int64, with starts < ends.
    """

    rows: Tensor
    starts: Tensor
    ends: Tensor

    def select(self, is_selected: Tensor) -> CallTable:
        """Return the calls for which `is_selected`, [C] bool, is true."""
        return CallTable(self.rows[is_selected], self.starts[is_selected], self.ends[is_selected])


@dataclass(frozen=True, slots=True)
class CallTokens:
    """The N tokens in a micro-batch's C calls; a token that several calls share is listed for each.

    Attributes:
        places: [N] int64, index in the flattened [B × T].
        call_of: [N] int64, index of the call.
        lengths: [C] int64.
    """

    places: Tensor
    call_of: Tensor
    lengths: Tensor

    @staticmethod
    def of(calls: CallTable, width: int) -> CallTokens:
        """Return the tokens of `calls`, whose rows have `width` tokens."""
        lengths = calls.ends - calls.starts
        call_of = torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths)
        first_of_call = lengths.cumsum(0) - lengths
        offset = torch.arange(call_of.numel(), device=lengths.device) - first_of_call[call_of]
        return CallTokens(calls.rows[call_of] * width + calls.starts[call_of] + offset, call_of, lengths)

    def counts(self, like: Tensor) -> Tensor:
        """Return in how many calls each token lies, with the shape [B, T] and dtype of `like`."""
        ones = torch.ones_like(self.places, dtype=like.dtype)
        return torch.zeros_like(like).flatten().index_add(0, self.places, ones).view(like.shape)

    def sums(self, values: Tensor) -> Tensor:
        """Return the sum over each call's tokens, [C], of values [B, T]."""
        return values.new_zeros(self.lengths.numel()).index_add(0, self.call_of, values.flatten()[self.places])

    def means(self, values: Tensor) -> Tensor:
        """Return the mean over each call's tokens, [C], of values [B, T]."""
        return self.sums(values) / self.lengths

    def to_tokens(self, call_values: Tensor, train_counts: Tensor) -> Tensor:
        """Return, for each token, the mean value of its calls, from `call_values` [C]; 0 for tokens outside all calls.

        The mean times `train_counts` [B, T] is the sum over the calls of the token.
        """
        return self.means_over_calls(call_values[self.call_of], train_counts)

    def means_over_calls(self, values: Tensor, train_counts: Tensor) -> Tensor:
        """Return each token's mean over its calls, from values [N]; 0 for tokens outside all calls."""
        sums = values.new_zeros(train_counts.numel()).index_add(0, self.places, values)
        return sums.view(train_counts.shape) / train_counts.clamp(min=1)


@dataclass(frozen=True, slots=True)
class PolicyBatch:
    """One micro-batch, padded.

    Attributes:
        logprobs: [B, T] float, finite; `logprobs[b, t]` is log π of token t given the tokens before it.
        old_logprobs: [B, T] float, the same under the policy before the update, the denominator of the ratios; ignored
            where `train_counts` is 0.
        advantages: [B, T] float, the advantage of each token's call; ignored where `train_counts` is 0.
        train_counts: [B, T] int64, how often each token was sampled and is trained; 0 for context and padding.
        calls: the calls; needed only by losses and corrections whose unit is a call.
        sampler_logprobs: [B, T] float, log μ, under the distributions that the tokens were sampled from; needed only by
            a correction.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    train_counts: Tensor
    calls: CallTable | None = None
    sampler_logprobs: Tensor | None = None

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

    def call_tokens(self) -> CallTokens:
        """Return the tokens of the calls.

        Raises:
            BackboneError: `calls` is missing, or does not cover the trained tokens as often as `train_counts` states.
        """
        if self.calls is None:
            raise BackboneError("this loss or correction needs the calls of the micro-batch: set PolicyBatch.calls")
        tokens = CallTokens.of(self.calls, self.train_counts.shape[1])
        wrong = int((tokens.counts(self.train_counts) != self.train_counts).sum())
        if wrong:
            raise BackboneError(
                f"PolicyBatch.calls do not match train_counts at {wrong} tokens: each token must lie in as many calls "
                "as its train count; pass exactly the trained spans of the samples"
            )
        return tokens


@dataclass(frozen=True, slots=True)
class LossMetrics:
    """Sums over trained tokens, weighted by their train counts: scalar float64 tensors without gradient.

    The sums of micro-batches add up, and `ratio_max` is the largest. They stay on their device, so that a micro-batch
    does not wait for a transfer.

    Attributes:
        trained_tokens: the number of trained tokens.
        clipped_low, clipped_high: the number of tokens with a ratio beyond the bound. For a loss that clips the update
            (all but CISPO's), only tokens whose advantage has the sign that makes the bound effective.
        ratio_sum, ratio_max: the importance ratio's sum and maximum (for GSPO, the ratio of the token's call).
        kl_sum: Σ (r - 1 - log r), where r is the token's ratio: the k3 estimate of KL(π_old ‖ π) for tokens sampled
            from π_old.
    """

    trained_tokens: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    ratio_sum: Tensor
    ratio_max: Tensor
    kl_sum: Tensor

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        batch: PolicyBatch,
        ratio: Tensor,
        clipped: tuple[Tensor, Tensor] | None = None,
        weight: Tensor | None = None,
    ) -> LossMetrics:
        """Return the metrics of one micro-batch.

        Args:
            ratio, clipped, weight: tensors of one shape, with an entry per token or per call: the importance ratios,
                whether they are clipped below and above, and the numbers of trained tokens. By default, nothing is
                clipped, and the weights are the train counts.
        """
        weight = batch.train_counts if weight is None else weight
        count = weight.double()
        low, high = (torch.zeros_like(count),) * 2 if clipped is None else clipped
        present = torch.where(weight > 0, ratio, torch.zeros_like(ratio)).double()
        log_ratio = batch.log_ratio().double()
        return cls(
            trained_tokens=count.sum(),
            clipped_low=(low * count).sum(),
            clipped_high=(high * count).sum(),
            ratio_sum=(present * count).sum(),
            ratio_max=present.amax() if present.numel() else present.sum(),
            kl_sum=((log_ratio.expm1() - log_ratio) * batch.train_counts).sum(),
        )


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A micro-batch's token losses.

    Attributes:
        token_losses: [B, T] in the dtype of the logprobs, 0 where `train_counts` is 0.
        metrics: the metrics of this micro-batch, which add up over micro-batches.
    """

    token_losses: Tensor
    metrics: LossMetrics
