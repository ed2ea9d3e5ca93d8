"""Attention of few tokens in bfloat16 on a CPU.

PyTorch's attention kernel for CPUs multiplies small matrices one by one. Its backward pass reaches a twentieth of the
processor's rate for answers with some tens of tokens. Batched products of the heads that share keys take a quarter of
the time, up to some hundred keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# With more keys, PyTorch's kernel is as fast, and does not hold the scores of all pairs.
_MAX_KEYS = 256


def is_short(query: Tensor, keys: int) -> bool:
    """Return whether `short_attention` is faster than PyTorch's kernel.

    Args:
        query: [B, heads, S, width].
        keys: the number of keys.
    """
    return query.device.type == "cpu" and query.dtype == torch.bfloat16 and keys <= _MAX_KEYS


def short_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return the attention of some queries, with gradient.

    Scores, probabilities and their gradients are float32; the products with values, keys and queries accumulate in
    float32. Probabilities are computed again in the backward pass.

    Args:
        query: [B, heads, S, width].
        key, value: [B, key-value heads, T, width].
        mask: bool [S, T], true where a query attends to a key.
        scale: the factor of the scores.

    Returns:
        [B, heads, S, width].
    """
    attended: Tensor = _ShortAttention.apply(query, key, value, mask, scale)  # type: ignore[no-untyped-call]
    return attended


class _ShortAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
        # Query heads that share a key-value head take the axis of query positions.
        shapes = query.shape, key.shape
        query, key, value = (x.reshape(key.shape[0] * key.shape[1], -1, key.shape[-1]) for x in (query, key, value))
        ctx.save_for_backward(query, key, value, mask)
        ctx.scale, ctx.shapes = scale, shapes
        with torch.autocast("cpu", enabled=False):
            return torch.bmm(_probabilities(query, key, mask, scale).to(value.dtype), value).view(shapes[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask = ctx.saved_tensors
        of_queries, of_keys = ctx.shapes
        grad = grad.reshape(query.shape)
        with torch.autocast("cpu", enabled=False):
            probabilities = _probabilities(query, key, mask, ctx.scale)
            of_value = torch.bmm(probabilities.to(value.dtype).mT, grad)
            scores = torch.bmm(grad.float(), value.float().mT).mul_(probabilities)
            scores.addcmul_(probabilities, scores.sum(-1, keepdim=True), value=-1).mul_(ctx.scale)
            scores = scores.to(query.dtype)
            of_query, of_key = torch.bmm(scores, key), torch.bmm(scores.mT, query)
        return of_query.view(of_queries), of_key.view(of_keys), of_value.view(of_keys), None, None


def _probabilities(query: Tensor, key: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return the probabilities of the keys, [B × key-value heads, group × S, T] float32."""
    scores = torch.bmm(query.float() * scale, key.float().mT)
    by_query = scores.view(len(query), -1, *mask.shape).masked_fill_(~mask, -torch.inf)
    return by_query.softmax(-1).view(scores.shape)
