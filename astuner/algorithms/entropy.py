"""Entropy of next-token distributions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# The size of a chunk, so that intermediate results fit into a CPU's cache and take little GPU memory.
_CHUNK_ELEMENTS = 1 << 20


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

    "Beyond the 80/20 Rule" (arXiv:2506.01939, eq. 6) trains only the tokens of high entropy, with a share of 0.2. The
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
