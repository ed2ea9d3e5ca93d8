"""Entropy of next-token distributions, for logging."""

from __future__ import annotations

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
