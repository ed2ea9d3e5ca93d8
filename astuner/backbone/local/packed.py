"""Computing every distinct prefix of a micro-batch's rows once.

The rows of a micro-batch begin alike: episodes of one task share its prompt, timelines of one episode all that came
before they parted. The stock model runs over one sequence that holds each distinct prefix once (see
`context_tracker.packing`). All that is ours is the attention, which transformers takes as a registered function:
a token attends to its ancestors. Outputs and gradients are those of separate rows but for rounding.

On a CPU, attention is computed piece by piece, each behind the pieces before it, and never over N × N pairs. On a GPU,
FlexAttention (Dong et al. 2024, arXiv:2412.05496) skips the blocks of pairs without an ancestor; where it cannot be
compiled, a dense mask does the same with more work.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
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
    device = nodes.device
    block_mask = ancestor_blocks(packing, device) if device.type == "cuda" else None
    output = model(
        input_ids=torch.from_numpy(packing.token_ids)[None].to(device),
        position_ids=torch.from_numpy(packing.positions)[None].to(device),
        # Handed on as it is; without one, transformers would make one of N × N.
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device),
        logits_to_keep=nodes,
        use_cache=False,
        packing=packing,
        block_mask=block_mask,
    )
    logits: Tensor = output.logits[0]
    return logits


def ancestor_blocks(packing: Packing, device: torch.device) -> BlockMask | Tensor:
    """Return which nodes see which, for FlexAttention; as a bool [1, 1, N, N] where it cannot be compiled."""
    ends = torch.from_numpy(packing.subtree_ends).to(device)

    def sees(_batch: Tensor, _head: Tensor, node: Tensor, other: Tensor) -> Tensor:
        return (other <= node) & (node < ends[other])

    size = len(packing.token_ids)
    if not _can_compile():
        nodes = torch.arange(size, device=device)
        return sees(nodes, nodes, nodes[:, None], nodes)[None, None]
    # Compiled, it looks at blocks as it goes; otherwise it would write down all N × N pairs first.
    return create_block_mask(sees, None, None, size, size, device=str(device), _compile=device.type == "cuda")


def _can_compile() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    # Micro-batches differ in length; each would be compiled for itself otherwise.
    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=True)
    return compiled


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing | None = None,
    block_mask: BlockMask | Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' "sdpa" does, or over a packing: query [1, heads, N, width] to [1, N, heads, width]."""
    sdpa: Callable[..., tuple[Tensor, None]] = sdpa_attention_forward
    if packing is None:
        return sdpa(module, query, key, value, attention_mask, **kwargs)
    if isinstance(block_mask, BlockMask):
        flex: Any = _compiled_flex_attention() if query.is_cuda else flex_attention
        attended = flex(query, key, value, block_mask=block_mask, scale=kwargs.get("scaling"), enable_gqa=True)
        return attended.transpose(1, 2), None
    if block_mask is not None:
        return sdpa(module, query, key, value, block_mask, **kwargs)
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
