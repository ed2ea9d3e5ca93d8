"""Log-probabilities of given tokens under a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from astuner.backbone.local.algorithms import entropy_from_logprobs
from astuner.backbone.local.shared_prefix import common_prefix, logits_of_shared


def token_logprobs(model: Any, token_ids: Tensor, wanted: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each wanted token given those before it, and the entropy at its place.

    Args:
        model: a causal language model of transformers.
        token_ids: [B, T] int64, padded on the right, T of 2 or more.
        wanted: [B, T]: non-zero where the result is needed; the first column cannot be.
        temperature: logits are divided by it first, as the sampler did (0, greedy, leaves them as they are).

    Returns:
        Two [B, T] float32 tensors, 0 before the first column that any row wants. The entropy has no gradient.
    """
    columns = wanted.ne(0).any(dim=0).nonzero()
    first = max(int(columns[0]), 1) if len(columns) else token_ids.shape[1] - 1
    logits, index = _logits(model, token_ids, first)
    logits = logits.float()
    if temperature not in (0.0, 1.0):
        logits = logits / temperature
    targets = torch.zeros(len(logits), dtype=token_ids.dtype, device=token_ids.device)
    targets[index] = token_ids[:, first:]
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(-1, targets[:, None])[:, 0]
    pad = (first, 0)
    return torch.nn.functional.pad(chosen[index], pad), torch.nn.functional.pad(
        entropy_from_logprobs(logprobs)[index], pad
    )


def _logits(model: Any, token_ids: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Return logits [M, V], and [B, T - first]: which of the M predicts a place."""
    prefix = common_prefix(model, token_ids)
    if prefix:
        return logits_of_shared(model, token_ids, prefix, first)
    # Rows are padded on the right, so a causal model needs no attention mask: no token sees padding.
    # One more logit than targets is kept, as the last one predicts nothing that is known.
    kept = token_ids.shape[1] - first + 1
    logits = model(input_ids=token_ids, logits_to_keep=kept, use_cache=False).logits[:, -kept:-1].flatten(0, 1)
    return logits, torch.arange(len(logits), device=token_ids.device).view(len(token_ids), -1)
