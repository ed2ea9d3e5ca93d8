"""Log-probabilities of tokens under a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from astuner.algorithms import differentiable_entropy, entropy_from_logprobs
from astuner.backbone.local.packed_attention import packed_logits
from astuner.context_tracker import Packing


def token_logprobs(
    model: Any,
    token_ids: Tensor,
    mask: Tensor,
    temperature: Tensor | float,
    packing: Packing | None = None,
    *,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each selected token given the tokens before it, and the entropy at its position.

    Args:
        model: a causal language model of transformers.
        token_ids: [B, T] int64, padded on the right, T of 2 or more.
        mask: [B, T], non-zero for selected tokens; the first column must be 0.
        temperature: divides the logits, as in the sampler; 0 (greedy) leaves them unchanged. A tensor [B, T] has the
            temperature of each selected token.
        packing: a packing of the B rows, which computes every distinct prefix once; needs `enable_packed_attention`.
        entropy_gradient: whether the entropies have a gradient, which needs more memory.

    Returns:
        Two [B, T] float32 tensors, 0 for other tokens.
    """
    rows, columns = mask.ne(0).nonzero(as_tuple=True)
    places = _nodes(packing, token_ids)[rows, columns - 1] if packing else columns - 1
    needed, index = torch.unique(places, return_inverse=True)
    if packing:
        logits = packed_logits(model, packing, needed)
    else:
        # Rows are padded on the right, so a causal model needs no attention mask: no token sees padding.
        logits = model(input_ids=token_ids, logits_to_keep=needed, use_cache=False).logits
        logits, index = logits.flatten(0, 1), rows * len(needed) + index
    logits = logits.float()
    if isinstance(temperature, Tensor):
        logits, index = _scaled(logits, index, temperature[rows, columns])
    elif temperature not in (0.0, 1.0):
        logits = logits / temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs[index, token_ids[rows, columns]]
    entropies = differentiable_entropy(logprobs) if entropy_gradient else entropy_from_logprobs(logprobs)
    empty = torch.zeros(token_ids.shape, device=token_ids.device)
    return empty.index_put((rows, columns), chosen), empty.index_put((rows, columns), entropies[index])


def _scaled(logits: Tensor, index: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits divided by each temperature that a token at their position has.

    Args:
        logits: [positions, vocabulary].
        index: [tokens], the position of each token.
        temperatures: [tokens] float32.

    Returns:
        [positions and temperatures, vocabulary], and the index of each token in it.
    """
    scales = torch.where(temperatures == 0, 1.0, temperatures)
    pairs, places = torch.unique(torch.stack([index.double(), scales.double()]), dim=1, return_inverse=True)
    return logits[pairs[0].long()] / pairs[1].float()[:, None], places


def _nodes(packing: Packing, token_ids: Tensor) -> Tensor:
    """Return [B, T] int64: the node of each token, 0 for padding."""
    nodes = torch.zeros_like(token_ids)
    for row, places in zip(nodes, packing.places, strict=True):
        row[: len(places)] = torch.from_numpy(places).to(row.device)
    return nodes
