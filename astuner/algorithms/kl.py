"""Next-token distributions' entropies, and per-token estimates of the KL divergence to a reference policy.

The estimates are those of John Schulman, "Approximating KL divergence" (2020,
http://joschu.net/blog/kl-approx.html), with d = log π(token) - log π_ref(token), on tokens sampled from π:

    k1          d                   unbiased, high variance, of either sign
    k2          d² / 2              biased, low variance, never negative
    low_var_kl  exp(-d) - 1 + d     k3: unbiased, low variance, never negative (also DeepSeekMath,
                                    arXiv:2402.03300, eq. 4)

In the reward, the value of an estimate matters, and k1 is the usual choice (RLOO, REINFORCE++). In the loss, its
gradient matters, and an unbiased value can have a biased gradient. With tokens sampled from π:

    k1          ∇ log π             expectation 0: it adds only noise
    k2          d ∇ log π           expectation ∇ KL(π ‖ π_ref): the correct gradient
    low_var_kl  (1 - exp(-d)) ∇ log π   expectation ∇ KL(π_ref ‖ π), which to first order in d is the same
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from astuner.config.algorithm_settings import KlType

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clipped to ± this before `exp` (e^20 ≈ 4.9e8), so that one token cannot overflow a sum. The gradient
of a token beyond the limit is zero."""

K3_LIMIT = 10.0
"""k3 is clipped to this value, as in verl, so that a token that the reference finds much more likely (14 times as
likely, or more) cannot dominate a batch. The gradient of a token beyond the limit is zero."""
# The size of a chunk, so that intermediate results fit into a CPU's cache and take little GPU memory.
_CHUNK_ELEMENTS = 1 << 20


def token_kl(logprobs: Tensor, ref_logprobs: Tensor, kind: KlType) -> Tensor:
    """Estimate KL(π ‖ π_ref) at each token (see the module's docstring).

    Args:
        logprobs: float, any shape: log-probabilities under π.
        ref_logprobs: float, the same shape: log-probabilities under the reference, without gradient.
        kind: `k1`, `k2` or `low_var_kl`.

    Returns:
        The same shape and dtype, in nats. The difference is first clipped to ± `LOG_RATIO_LIMIT`, and k3 to `K3_LIMIT`.
    """
    difference = (logprobs - ref_logprobs.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference.square() / 2
    # Near d = 0, where most tokens are, expm1 is more accurate than exp(-d) - 1.
    return ((-difference).expm1() + difference).clamp(max=K3_LIMIT)


@torch.no_grad()
def entropy_from_logprobs(logprobs: Tensor) -> Tensor:
    """Return the entropy of distributions in nats.

    Args:
        logprobs: [..., V] float, log-probabilities; -inf for an impossible token.

    Returns:
        [...] of the same dtype, without gradient.
    """
    rows = logprobs.reshape(-1, logprobs.shape[-1])
    # Replace -inf by the lowest finite number: its probability is 0 too, and 0 times it is 0, not NaN.
    chunks = torch.split(rows, max(_CHUNK_ELEMENTS // rows.shape[-1], 1))
    finite = (chunk.clamp_min(torch.finfo(chunk.dtype).min) for chunk in chunks)
    return torch.cat([-(chunk.exp() * chunk).sum(dim=-1) for chunk in finite]).view(logprobs.shape[:-1])


def differentiable_entropy(logprobs: Tensor) -> Tensor:
    """Return the entropy of distributions in nats, with its gradient; see `entropy_from_logprobs`."""
    finite = logprobs.clamp_min(torch.finfo(logprobs.dtype).min)
    return -(finite.exp() * finite).sum(dim=-1)


def high_entropy_threshold(entropies: Tensor, train_counts: Tensor, share: float) -> float:
    """Return the entropy that a given share of the trained tokens exceeds.

    "Beyond the 80/20 Rule" (arXiv:2506.01939, eq. 6) trains only tokens with high entropy, with a share of 0.2. The
    threshold lies between two entropies, so that rounding changes no token's side.

    Args:
        entropies: any shape, float.
        train_counts: the same shape; how often each token counts.
        share: in (0, 1]; 1 selects all tokens. At least one token is selected, with all tokens of equal entropy.
    """
    values = torch.repeat_interleave(entropies.flatten(), train_counts.flatten()).double().sort(descending=True).values
    count = max(1, math.floor(share * len(values) + 0.5))
    if count >= len(values):
        return -math.inf
    smallest = values[count - 1]
    lower = values[values < smallest]
    return float(smallest + lower[0]) / 2 if lower.numel() else -math.inf
