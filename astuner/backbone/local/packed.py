"""Computing every distinct prefix of a micro-batch's rows once.

The rows of a micro-batch begin alike: episodes of one task share its prompt, timelines of one episode all that came
before they parted. The stock model runs over one sequence that holds each distinct prefix once (see
`context_tracker.packing`). All that is ours is the attention, which transformers takes as a registered function:
a token attends to its ancestors. Outputs and gradients are those of separate rows but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from astuner.context_tracker import Packing, Piece

_NAME = "astuner_packed"
MODEL_TYPES = ("llama", "qwen2", "qwen3")


def enable(model: Any) -> None:
    """Let a transformers model compute packed rows, where it is one whose attention we know all of."""
    config = model.config
    windowed = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if config.model_type in MODEL_TYPES and not windowed and config._attn_implementation == "sdpa":
        AttentionInterface.register(_NAME, _attend)
        AttentionMaskInterface.register(_NAME, sdpa_mask)
        model.set_attn_implementation(_NAME)


def takes_packings(model: Any) -> bool:
    """Whether `enable` has prepared the model."""
    return bool(model.config._attn_implementation == _NAME)


def packed_logits(model: Any, packing: Packing, nodes: Tensor) -> Tensor:
    """Return the logits that follow some nodes of a packing.

    Args:
        model: as given to `enable`.
        packing: N nodes.
        nodes: [M] int64.

    Returns:
        [M, vocabulary].
    """
    output = model(
        input_ids=torch.from_numpy(packing.token_ids)[None].to(nodes.device),
        position_ids=torch.from_numpy(packing.positions)[None].to(nodes.device),
        # Handed on as it is; without one, transformers would make one of N × N.
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=nodes.device),
        logits_to_keep=nodes,
        use_cache=False,
        packing=packing,
    )
    logits: Tensor = output.logits[0]
    return logits


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' "sdpa" does, or over a packing: query [1, heads, N, width] to [1, N, heads, width]."""
    sdpa: Callable[..., tuple[Tensor, None]] = sdpa_attention_forward
    if packing is None:
        return sdpa(module, query, key, value, attention_mask, **kwargs)
    # Split once: the backward pass of a slice writes as much as it was cut from, for each of the slices.
    sizes = [piece.size for piece in packing.pieces]
    queries, keys, values = (torch.split(heads, sizes, dim=2) for heads in (query, key, value))
    number = {piece.start: index for index, piece in enumerate(packing.pieces)}
    outputs: list[Tensor | None] = [None] * len(sizes)
    for batch in packing.batches:
        first = packing.pieces[batch[0]]
        before = [(number[start], end - start) for start, end in first.path]
        whole = [_behind(before, [part[index] for index in batch], part) for part in (keys, values)]
        mask = _visible(first, query.device) if before else None
        output, _ = sdpa(module, _stacked([queries[index] for index in batch]), *whole, mask, **kwargs)
        for index, row in zip(batch, output.unbind(), strict=True):
            outputs[index] = row[: sizes[index]]
    return torch.cat(outputs)[None], None  # type: ignore[arg-type]


def _stacked(pieces: Sequence[Tensor]) -> Tensor:
    """Return [1, heads, S, width] tensors as [B, heads, longest S, width]; the first is the longest."""
    longest = pieces[0].shape[2]
    return torch.cat([torch.nn.functional.pad(piece, (0, 0, 0, longest - piece.shape[2])) for piece in pieces])


def _behind(before: Sequence[tuple[int, int]], batch: Sequence[Tensor], pieces: Sequence[Tensor]) -> Tensor:
    """Return [B, heads, P + S, width]: a batch of pieces, each behind the beginnings of `pieces` that come before."""
    own = _stacked(batch)
    beginnings = [pieces[index][:, :, :size].expand(len(batch), -1, -1, -1) for index, size in before]
    return torch.cat([*beginnings, own], dim=2) if before else own


def _visible(piece: Piece, device: torch.device) -> Tensor:
    """Return [1, 1, S, P + S] bool: tokens see all before their piece, and those of the piece up to themselves."""
    mask = torch.ones(piece.size, piece.depth + piece.size, dtype=torch.bool, device=device)
    return mask.tril(piece.depth)[None, None]
