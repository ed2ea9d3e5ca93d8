"""Metrics of a policy loss that add up over micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossMetrics:
    """Sums over trained tokens, weighted by their train counts: scalar float64 tensors without gradient.

    Add the metrics of micro-batches with `+`, then call `summary`. Until then they stay on their device, so that a
    micro-batch does not wait for a transfer.

    Attributes:
        trained_tokens: the number of trained tokens.
        clipped_low, clipped_high: the number of tokens with a ratio beyond the bound. For a loss that clips the update
            (all but CISPO's), only tokens whose advantage has the sign that makes the bound effective.
        ratio_sum, ratio_max: sum and maximum of the importance ratio (for GSPO, that of the token's call).
        kl_sum: sum of r - 1 - log r, where r is the ratio of the token: the k3 estimate of KL(π_old ‖ π) for tokens
            sampled from π_old.
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
        *,
        ratio: Tensor,
        weight: Tensor,
        clipped_low: Tensor,
        clipped_high: Tensor,
        token_log_ratio: Tensor,
        train_counts: Tensor,
    ) -> LossMetrics:
        """Return the metrics of one micro-batch.

        Args:
            ratio, weight, clipped_low, clipped_high: of one shape, with an entry per token or per call; the weight is
                the number of trained tokens of the entry.
            token_log_ratio, train_counts: [B, T].
        """
        count = weight.double()
        present = torch.where(weight > 0, ratio, torch.zeros_like(ratio)).double()
        kl = token_log_ratio.double().expm1() - token_log_ratio.double()
        return cls(
            trained_tokens=count.sum(),
            clipped_low=(clipped_low * count).sum(),
            clipped_high=(clipped_high * count).sum(),
            ratio_sum=(present * count).sum(),
            ratio_max=present.amax() if present.numel() else present.sum(),
            kl_sum=(kl * train_counts).sum(),
        )

    def __add__(self, other: LossMetrics) -> LossMetrics:
        return LossMetrics(
            trained_tokens=self.trained_tokens + other.trained_tokens,
            clipped_low=self.clipped_low + other.clipped_low,
            clipped_high=self.clipped_high + other.clipped_high,
            ratio_sum=self.ratio_sum + other.ratio_sum,
            ratio_max=torch.maximum(self.ratio_max, other.ratio_max),
            kl_sum=self.kl_sum + other.kl_sum,
        )

    def summary(self) -> dict[str, float]:
        """Return means over trained tokens, and the largest ratio, by metric name.

        The names are `clip_fraction_low`, `clip_fraction_high`, `ratio_mean`, `ratio_max` and `approx_kl`. All values
        are 0 if no token is trained.
        """
        means = torch.stack([self.clipped_low, self.clipped_high, self.ratio_sum, self.kl_sum])
        means = means / self.trained_tokens.clamp(min=1)
        low, high, ratio, kl, ratio_max = torch.cat([means, self.ratio_max[None]]).tolist()
        return {
            "clip_fraction_low": low,
            "clip_fraction_high": high,
            "ratio_mean": ratio,
            "ratio_max": ratio_max,
            "approx_kl": kl,
        }
