"""Entropy of next-token distributions, for logging."""

from __future__ import annotations

import torch
from torch import Tensor

# At a time, so that what is in between stays in a processor's cache, and takes little of a GPU's memory.
_CHUNK_ELEMENTS = 1 << 20


@torch.no_grad()
def entropy_from_logprobs(logprobs: Tensor) -> Tensor:
    """Return the entropy of distributions in nats.

    Args:
        logprobs: [..., V] float, log-probabilities; -inf stands for an impossible token.

    Returns:
        [...] of the same type, without gradient.
    """
    rows = logprobs.reshape(-1, logprobs.shape[-1])
    # The lowest number in the place of -inf: its probability is 0 too, and 0 times it is 0.
    chunks = torch.split(rows, max(_CHUNK_ELEMENTS // rows.shape[-1], 1))
    finite = (chunk.clamp_min(torch.finfo(chunk.dtype).min) for chunk in chunks)
    return torch.cat([-(chunk.exp() * chunk).sum(dim=-1) for chunk in finite]).view(logprobs.shape[:-1])
