"""Measurements of a policy loss that add up over micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossMetrics:
    """Sums over trained tokens, each token as often as it is trained: scalar float64 tensors, no gradient.

    Add those of micro-batches with `+`, then take the `summary`. They stay on their device until then, so
    that a micro-batch does not wait for them.

    Attributes:
        trained_tokens: how many tokens are trained.
        clipped_low, clipped_high: how many have a ratio beyond that bound. For a loss that clips the update
            (all but CISPO's), only where the advantage's sign makes the bound matter.
        ratio_sum, ratio_max: of the importance ratio (of the token's call for GSPO).
        kl_sum: sum of r - 1 - log r with r the token's ratio: k3 of KL(π_old ‖ π), for tokens sampled from π_old.
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
        loss_mask: Tensor,
    ) -> LossMetrics:
        """Measure one micro-batch.

        Args:
            ratio, weight, clipped_low, clipped_high: of one shape, a token or a call each; the weight is the
                number of trained tokens that the entry stands for.
            token_log_ratio, loss_mask: [B, T].
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
            kl_sum=(kl * loss_mask).sum(),
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
        """Return means over trained tokens, and the largest ratio, by the names under which they are logged.

        Keys: `clip_fraction_low`, `clip_fraction_high`, `ratio_mean`, `ratio_max`, `approx_kl`. All are 0 where
        no token is trained.
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
