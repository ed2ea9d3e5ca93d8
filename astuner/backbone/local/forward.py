"""Log-probabilities of given tokens under a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from astuner.backbone.algorithms import entropy_from_logprobs
from astuner.backbone.local.packed import packed_logits
from astuner.context_tracker import Packing


def token_logprobs(
    model: Any, token_ids: Tensor, wanted: Tensor, temperature: float, packing: Packing | None = None
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each wanted token given those before it, and the entropy at its place.

    Args:
        model: a causal language model of transformers.
        token_ids: [B, T] int64, padded on the right, T of 2 or more.
        wanted: [B, T]: non-zero where the result is needed; the first column cannot be.
        temperature: logits are divided by it first, as the sampler did (0, greedy, leaves them as they are).
        packing: of the B rows, to compute every distinct prefix once; the model must take it (`packed.enable`).

    Returns:
        Two [B, T] float32 tensors, 0 where nothing is wanted. The entropy has no gradient.
    """
    rows, columns = wanted.ne(0).nonzero(as_tuple=True)
    places = _nodes(packing, token_ids)[rows, columns - 1] if packing else columns - 1
    needed, index = torch.unique(places, return_inverse=True)
    if packing:
        logits = packed_logits(model, packing, needed)
    else:
        # Rows are padded on the right, so a causal model needs no attention mask: no token sees padding.
        logits = model(input_ids=token_ids, logits_to_keep=needed, use_cache=False).logits
        logits, index = logits.flatten(0, 1), rows * len(needed) + index
    logits = logits.float()
    if temperature not in (0.0, 1.0):
        logits = logits / temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs[index, token_ids[rows, columns]]
    result, entropies = torch.zeros((2, *token_ids.shape), device=token_ids.device).unbind()
    entropies[rows, columns] = entropy_from_logprobs(logprobs)[index]
    return result.index_put((rows, columns), chosen), entropies


def _nodes(packing: Packing, token_ids: Tensor) -> Tensor:
    """Return [B, T] int64: the node of each token, 0 for padding."""
    nodes = torch.zeros_like(token_ids)
    for row, places in zip(nodes, packing.places, strict=True):
        row[: len(places)] = torch.from_numpy(places).to(row.device)
    return nodes
