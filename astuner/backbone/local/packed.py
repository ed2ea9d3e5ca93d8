"""Computing every distinct prefix of a micro-batch's rows once.

The rows of a micro-batch begin alike: episodes of one task share its prompt, timelines of one episode all that came
before they parted. The stock model runs over one sequence that holds each distinct prefix once (see
`context_tracker.packing`). All that is ours is the attention, which transformers takes as a registered function:
a token attends to its ancestors. Outputs and gradients are those of separate rows but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from astuner.context_tracker import Packing

_NAME = "astuner_packed"
_MODEL_TYPES = ("llama", "qwen2", "qwen3")


def enable(model: Any) -> None:
    """Let a transformers model compute packed rows, where it is one whose attention we know all of."""
    config = model.config
    windowed = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if config.model_type in _MODEL_TYPES and not windowed and config._attn_implementation == "sdpa":
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
    sizes = [piece.end - piece.start for piece in packing.pieces]
    number = {piece.start: index for index, piece in enumerate(packing.pieces)}
    # Split once: the backward pass of a slice writes as much as it was cut from, for each of the slices.
    queries, keys, values = (torch.split(heads, sizes, dim=2) for heads in (query, key, value))
    outputs = []
    for index, piece in enumerate(packing.pieces):
        if not piece.path:
            outputs.append(sdpa(module, queries[index], keys[index], values[index], None, **kwargs)[0])
            continue
        before = [(number[start], end - start) for start, end in piece.path]
        whole = (
            torch.cat([*(part[at][:, :, :size] for at, size in before), part[index]], dim=2) for part in (keys, values)
        )
        depth, size = piece.depth, sizes[index]
        mask = torch.ones(size, depth + size, dtype=torch.bool, device=query.device).tril(depth)[None, None]
        outputs.append(sdpa(module, queries[index], *whole, mask, **kwargs)[0])
    return torch.cat(outputs, dim=1), None
