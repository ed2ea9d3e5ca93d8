"""Packed attention: computes each distinct prefix in a micro-batch's rows once.

The rows of a micro-batch share prefixes: a task's episodes share its prompt, and an episode's timelines share the
tokens before they diverge. The unchanged transformers model runs over one sequence that contains each distinct prefix
once (see `context_tracker.packing`). Only the attention function differs. It is registered with transformers, and lets
a token attend to its ancestors. Except for rounding, outputs and gradients equal those of separate rows.

On a CPU, attention is computed piece by piece; each piece attends to its ancestors and itself, so the N × N matrix is
never computed. On a GPU, FlexAttention (Dong et al. 2024, arXiv:2412.05496) skips the blocks without ancestors. Where
it cannot be compiled, a dense mask gives the same result with more computation.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from astuner.context_tracker.packing import Packing, Piece

_NAME = "astuner_packed"
SUPPORTED_MODELS = "llama, qwen2, qwen3, without sliding windows"
_MODEL_TYPES = ("llama", "qwen2", "qwen3")
# With more keys, PyTorch's kernel is as fast as `short_attention`, and does not hold the scores of all pairs.
_MAX_KEYS = 256
# On a CPU, each batch of pieces is a separate attention in each layer. Its copies and calls take about 0.2 ms, in which
# a core computes this many floating-point operations. On a GPU, one kernel computes all pieces.
_KERNEL_OPERATIONS = 4e6


def has_packed_attention(config: Any) -> bool:
    """Return whether packed attention supports models with a configuration of transformers."""
    has_windows = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    return config.model_type in _MODEL_TYPES and not has_windows


def enable_packed_attention(model: Any) -> None:
    """Register packed attention with a transformers model. Does nothing if its architecture is not supported."""
    if has_packed_attention(model.config) and model.config._attn_implementation == "sdpa":
        AttentionInterface.register(_NAME, _attend)
        AttentionMaskInterface.register(_NAME, sdpa_mask)
        model.set_attn_implementation(_NAME)


def supports_packing(model: Any) -> bool:
    """Return whether `enable_packed_attention` has prepared the model."""
    return bool(model.config._attn_implementation == _NAME)


def packed_logits(model: Any, packing: Packing, nodes: Tensor) -> Tensor:
    """Return the logits [M, vocabulary] at `nodes` [M] int64 of a packing, from a model with packed attention."""
    logits: Tensor = model(use_cache=False, **packed_inputs(packing, nodes)).logits[0]
    return logits


def packed_inputs(packing: Packing, nodes: Tensor) -> dict[str, Any]:
    """Return the arguments with which a model computes the logits at some nodes of a packing (see `packed_logits`)."""
    device = nodes.device
    return {
        "input_ids": torch.from_numpy(packing.token_ids)[None].to(device),
        "position_ids": torch.from_numpy(packing.positions)[None].to(device),
        # A placeholder, which is ignored; without it, transformers would create an N × N mask.
        "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device),
        "logits_to_keep": nodes,
        "packing": packing,
        "block_mask": ancestor_blocks(packing, device) if device.type == "cuda" else None,
    }


def ancestor_blocks(packing: Packing, device: torch.device) -> BlockMask | Tensor:
    """Return FlexAttention's mask of ancestors, or a bool [1, 1, N, N] mask where FlexAttention cannot be compiled."""
    ends = torch.from_numpy(packing.subtree_ends).to(device)

    def is_ancestor(_batch: Tensor, _head: Tensor, node: Tensor, other: Tensor) -> Tensor:
        return (other <= node) & (node < ends[other])

    size = len(packing.token_ids)
    if not _can_compile():
        nodes = torch.arange(size, device=device)
        return is_ancestor(nodes, nodes, nodes[:, None], nodes)[None, None]
    # The compiled function evaluates one block at a time; otherwise it would create all N × N pairs first.
    return create_block_mask(is_ancestor, None, None, size, size, device=str(device), _compile=device.type == "cuda")


def _can_compile() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    # Micro-batches differ in length, and static shapes would need a compilation for each.
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
    """Compute attention over a packing, or as transformers' "sdpa" does if there is none.

    Args:
        query: [1, heads, N, width].
        key, value: [1, key-value heads, N, width].
        attention_mask: used only if there is no packing.
        block_mask: as `ancestor_blocks` returns it; None on a CPU.
        kwargs: passed to "sdpa".

    Returns:
        [1, N, heads, width], and None for the attention weights.
    """
    sdpa: Callable[..., tuple[Tensor, None]] = sdpa_attention_forward
    if packing is None:
        return sdpa(module, query, key, value, attention_mask, **kwargs)
    if isinstance(block_mask, BlockMask):
        flex: Any = _compiled_flex_attention() if query.is_cuda else flex_attention
        attended = flex(query, key, value, block_mask=block_mask, scale=kwargs.get("scaling"), enable_gqa=True)
        return attended.transpose(1, 2), None
    if block_mask is not None:
        return sdpa(module, query, key, value, block_mask, **kwargs)
    scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
    if torch.is_autocast_enabled("cpu"):
        # Rotary embeddings are float32. Autocast would convert each piece.
        query, key, value = (heads.to(torch.get_autocast_dtype("cpu")) for heads in (query, key, value))
    # Split once: the backward pass of each separate slice would write a gradient of the full size.
    sizes = [piece.size for piece in packing.pieces]
    queries, keys, values = (torch.split(heads, sizes, dim=2) for heads in (query, key, value))
    number = {piece.start: index for index, piece in enumerate(packing.pieces)}
    outputs: list[Tensor | None] = [None] * len(sizes)
    for batch in packing.batches:
        first = packing.pieces[batch[0]]
        prefix = [(number[start], end - start) for start, end in first.path]
        key, value = (_with_prefix(prefix, [part[index] for index in batch], part) for part in (keys, values))
        stacked = _stack_padded([queries[index] for index in batch])
        if is_short(query, first.depth + first.size) and not kwargs.get("dropout"):
            mask = _causal_mask(first, query.device)
            output = short_attention(stacked, key, value, mask, scale).transpose(1, 2)
        else:
            whole = _causal_mask(first, query.device)[None, None] if prefix else None
            output, _ = sdpa(module, stacked, key, value, whole, **kwargs)
        for index, row in zip(batch, output.unbind(), strict=True):
            outputs[index] = row[: sizes[index]]
    return torch.cat(outputs)[None], None  # type: ignore[arg-type]


def _stack_padded(pieces: Sequence[Tensor]) -> Tensor:
    """Return B tensors [1, heads, S, width], padded to the first and longest one, as [B, heads, longest S, width]."""
    longest = pieces[0].shape[2]
    return torch.cat([torch.nn.functional.pad(piece, (0, 0, 0, longest - piece.shape[2])) for piece in pieces])


def _with_prefix(prefix: Sequence[tuple[int, int]], batch: Sequence[Tensor], pieces: Sequence[Tensor]) -> Tensor:
    """Return a batch of B pieces [1, heads, S, width], each after their prefix: [B, heads, P + longest S, width].

    `prefix` has, for each piece of the prefix, its index in `pieces` and the number of tokens used; P tokens.
    """
    stacked = _stack_padded(batch)
    prefix_tensors = [pieces[index][:, :, :size].expand(len(batch), -1, -1, -1) for index, size in prefix]
    return torch.cat([*prefix_tensors, stacked], dim=2) if prefix else stacked


def _causal_mask(piece: Piece, device: torch.device) -> Tensor:
    """Return the bool mask [S, P + S] by which S tokens attend to P earlier tokens and causally to themselves."""
    mask = torch.ones(piece.size, piece.depth + piece.size, dtype=torch.bool, device=device)
    return mask.tril(piece.depth)


def is_short(query: Tensor, keys: int) -> bool:
    """Return whether `short_attention` is faster than PyTorch's kernel for queries [B, heads, S, width]."""
    return query.device.type == "cpu" and query.dtype == torch.bfloat16 and keys <= _MAX_KEYS


def short_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return the attention of some queries to few keys, in bfloat16 on a CPU, with gradient.

    PyTorch's kernel for CPUs multiplies small matrices one by one. Its backward pass reaches a twentieth of the
    processor's rate for answers with some tens of tokens. Batched products of the heads that share keys take a quarter
    of the time, up to some hundred keys.

    Scores, probabilities and their gradients are float32; the products with values, keys and queries accumulate in
    float32. Probabilities are computed again in the backward pass.

    Args:
        query: [B, heads, S, width].
        key, value: [B, key-value heads, T, width].
        mask: bool [S, T], true where a query attends to a key.

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


@dataclass(frozen=True)
class PackCosts:
    """Operations of a forward pass, by which rows are packed or separate. A backward pass takes a multiple of them.

    Attributes:
        per_pair: operations per pair of tokens that an attention kernel computes. A causal kernel computes half of all
            pairs, a kernel with a mask all of them.
        per_batch: operations that take as long as the overhead for one batch of a packing's pieces.
    """

    per_token: float
    per_pair: float
    per_batch: float

    def of_packing(self, packing: Packing) -> float:
        """Return the operations of a forward pass over a packing."""
        pairs = 0.0
        for batch in packing.batches:
            piece = packing.pieces[batch[0]]
            keys = piece.depth + piece.size if piece.path else piece.size / 2
            pairs += len(batch) * piece.size * keys
        return self.per_token * len(packing.token_ids) + self.per_pair * pairs + self.per_batch * len(packing.batches)

    def of_separate_rows(self, packing: Packing) -> float:
        """Return the operations for computing a packing's sequences as separate rows, without padding."""
        lengths = [len(places) for places in packing.places]
        return sum(self.per_token * length + self.per_pair * length * length / 2 for length in lengths)

    def is_cheaper_packed(self, packing: Packing) -> bool:
        """Return whether a packing takes fewer operations than separate rows."""
        return self.of_packing(packing) < self.of_separate_rows(packing)


def count_pack_costs(model: Any, device: torch.device) -> PackCosts:
    """Count the operations in a forward pass, for a model with packed attention.

    The counts depend on the model and the device only, so a run and its repetition compute the same rows together
    and round alike.
    """
    config = model.config
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    # A weight of a linear layer is multiplied and added once per token. Logits are needed for the same tokens with and
    # without packing.
    embeddings = {id(module) for module in (model.get_input_embeddings(), model.get_output_embeddings())}
    linear = sum(
        module.weight.numel()
        for module in model.modules()
        if isinstance(module, torch.nn.Linear) and id(module) not in embeddings
    )
    # The products of queries with keys, and of probabilities with values.
    return PackCosts(2.0 * linear, 4.0 * layers * width, _KERNEL_OPERATIONS * layers if device.type == "cpu" else 0.0)
