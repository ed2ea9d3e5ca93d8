"""Entropy of next-token distributions, for logging."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def entropy_from_logits(logits: Tensor, chunk_tokens: int = 1024) -> Tensor:
    """Return the entropy of softmax(logits) in nats, in float32.

    Args:
        logits: [..., V] float of any precision; -inf stands for an impossible token.
        chunk_tokens: tokens computed at a time, so that float32 copies take chunk_tokens × V × 8 bytes.

    Returns:
        [...] float32, without gradient.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    chunks = [
        torch.special.entr(torch.softmax(chunk.float(), dim=-1)).sum(dim=-1)
        for chunk in torch.split(rows, chunk_tokens)
    ]
    return torch.cat(chunks).view(logits.shape[:-1])
