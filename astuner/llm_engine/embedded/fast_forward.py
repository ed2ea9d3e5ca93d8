"""A batched forward pass for Llama-like models: Llama, Qwen2, Qwen3.

RMSNorm, rotary position embeddings, grouped-query attention and SwiGLU, with optional biases and per-head norms of
queries and keys (Llama: Touvron et al. 2023; GQA: Ainslie et al. 2023; RoPE: Su et al. 2021). The results equal those
of transformers' modules, computed with fewer and larger operations for many sequences with different lengths at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen2ForCausalLM, Qwen3ForCausalLM

from astuner.llm_engine.cpu_linear import linear, pack, packed_memory, unpack
from astuner.llm_engine.embedded.forward import KvShape, LaneGroup, PrefillChunk, WeightNames
from astuner.llm_engine.weight_digests import ROWS_PER_BLOCK

_MODEL_CLASSES = (LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
# RoPE types whose frequencies do not depend on the length of the sequence.
_STATIC_ROPE = {"default", "linear", "yarn", "llama3"}
# Below this size, a second copy of the weights, concatenated for speed, is cheap.
_FUSE_PARAMETERS = 200_000_000

_Projection = tuple[tuple[Tensor, Tensor | None], ...]


def supports(model: PreTrainedModel) -> bool:
    """Return whether `FastForward` computes exactly what `model` computes."""
    config = model.config
    return (
        # Subclasses may compute something else.
        type(model) in _MODEL_CLASSES
        and config.hidden_act == "silu"
        and getattr(model.model.rotary_emb, "rope_type", None) in _STATIC_ROPE
        and "sliding_attention" not in (getattr(config, "layer_types", None) or ())
        and all(_is_supported_weight(name) for name in model.state_dict())
    )


def joins_weights(model: PreTrainedModel, device: torch.device) -> bool:
    """Return whether `FastForward` copies and concatenates the weights of a model that it supports."""
    return device.type == "cpu" and sum(weight.numel() for weight in model.parameters()) < _FUSE_PARAMETERS


def kv_shape(model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> KvShape:
    """Return the shape of one token's cache."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return KvShape(
        2 * config.num_hidden_layers, getattr(config, "num_key_value_heads", None) or heads, width, dtype, device
    )


def _is_supported_weight(name: str) -> bool:
    """Return whether `FastForward` uses a weight. Adapters and quantised layers have other weights."""
    if name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
        return True
    prefix, _, rest = name.partition(".layers.")
    block, _, kind = rest.partition(".")[2].rpartition(".")
    return prefix == "model" and (
        (block in _LINEARS and kind in ("weight", "bias")) or (block in _NORMS and kind == "weight")
    )


_LINEARS = {f"self_attn.{x}_proj" for x in "qkvo"} | {f"mlp.{x}_proj" for x in ("gate", "up", "down")}
_NORMS = {"input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"}


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Tensor
    qkv: _Projection
    qk_norm: Tensor | None
    output: _Projection
    mlp_norm: Tensor
    gate_up: _Projection
    down: _Projection


@dataclass(frozen=True, slots=True)
class _LaneBatch:
    """The inputs of a decode step for one lane group, which are the same in all layers.

    Attributes:
        kv: the group's cache.
        rows: the group's rows in the batch.
        lanes, positions: [n], where to write each lane's new token.
        shared: number of initial keys that all lanes share, which are read from the first lane only. Decoding is bound
            by memory bandwidth, and agents' prompts start with the same long instructions.
        length: number of keys to attend to: the longest lane's.
        mask: [n × key-value heads, query heads per key-value head, length - shared], 0 or -inf.
    """

    kv: Tensor
    rows: slice
    lanes: Tensor
    positions: Tensor
    shared: int
    length: int
    mask: Tensor


class FastForward:
    """A `Forward` for a model that `supports` accepts.

    On a CPU, the weights of small models are copied, concatenated and packed for speed, and the model is not used
    again. Otherwise, the model's own weights are used in place, and `load` overwrites them.

    Args:
        model: source of the weights and the configuration.
        max_model_len: exclusive upper bound of positions.
    """

    def __init__(self, model: PreTrainedModel, max_model_len: int) -> None:
        config = model.config
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._eps: float = config.rms_norm_eps
        self._num_layers: int = config.num_hidden_layers
        self._names = WeightNames(model)
        embedding = self._names.tensors["model.embed_tokens.weight"]
        self._fuse = joins_weights(model, embedding.device)
        self.vocab_size = embedding.shape[0]
        self.kv_shape = kv_shape(model, embedding.dtype, embedding.device)
        self._cos, self._sin = _rope_table(model, max_model_len, embedding.dtype)
        self._set_weights(self._names.tensors)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Load new weights; see `Forward.load`."""
        resolved = self._names.resolve(weights)
        if self._fuse:
            self._set_weights(resolved)
        else:
            self._names.copy_into_model(resolved)
            self._set_weights(self._names.tensors)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights that the layers use; see `Forward.weights`."""
        yield "model.embed_tokens.weight", self._embedding
        yield "lm_head.weight", _readable(self._head, [len(self._embedding)])
        yield "model.norm.weight", self._final_norm
        for number, layer in enumerate(self._layers):
            prefix = f"model.layers.{number}."
            yield f"{prefix}input_layernorm.weight", layer.attention_norm
            yield f"{prefix}post_attention_layernorm.weight", layer.mlp_norm
            if layer.qk_norm is not None:
                yield f"{prefix}self_attn.q_norm.weight", layer.qk_norm[0]
                yield f"{prefix}self_attn.k_norm.weight", layer.qk_norm[self._heads]
            for block, names, parts in (
                ("self_attn", "qkv", layer.qkv),
                ("self_attn", "o", layer.output),
                ("mlp", ("gate", "up"), layer.gate_up),
                ("mlp", ("down",), layer.down),
            ):
                yield from self._projection_weights([f"{prefix}{block}.{name}_proj" for name in names], parts)

    def _projection_weights(self, paths: Sequence[str], parts: _Projection) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of a projection by name; those that are concatenated are views."""
        sizes = [len(self._names.tensors[f"{path}.weight"]) for path in paths]
        for kind, index in (("weight", 0), ("bias", 1)):
            tensors = [_readable(tensor, sizes) for part in parts if (tensor := part[index]) is not None]
            if len(parts) < len(paths) and tensors:
                tensors = list(torch.split(tensors[0], sizes))
            yield from zip([f"{path}.{kind}" for path in paths], tensors, strict=False)

    @torch.no_grad()
    def _set_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Make the layers use `weights`, or concatenated copies of them."""
        tied = weights["lm_head.weight"] is weights["model.embed_tokens.weight"]
        self._embedding = self._convert(weights["model.embed_tokens.weight"])
        head = self._embedding if tied else self._convert(weights["lm_head.weight"])
        self._head = pack(head) if self._fuse else head
        self._final_norm = self._convert(weights["model.norm.weight"])
        self._layers = [self._layer(weights, f"model.layers.{i}.") for i in range(self._num_layers)]

    def _convert(self, weight: Tensor) -> Tensor:
        """Return `weight` with the cache's dtype and device; a copy if weights are concatenated."""
        return weight.to(self.kv_shape.device, self.kv_shape.dtype, copy=self._fuse)

    def _layer(self, weights: Mapping[str, Tensor], prefix: str) -> _Layer:
        def project(block: str, names: Sequence[str]) -> _Projection:
            paths = [f"{prefix}{block}.{name}_proj" for name in names]
            kernels = [self._convert(weights[f"{path}.weight"]) for path in paths]
            biases = [self._convert(weights[f"{path}.bias"]) for path in paths if f"{path}.bias" in weights]
            if self._fuse:
                return ((pack(torch.cat(kernels)), torch.cat(biases) if biases else None),)
            return tuple(zip_longest(kernels, biases))

        qk_norm = None
        if f"{prefix}self_attn.q_norm.weight" in weights:
            q, k = (self._convert(weights[f"{prefix}self_attn.{x}_norm.weight"]) for x in "qk")
            qk_norm = torch.cat([q.expand(self._heads, -1), k.expand(self._kv_heads, -1)])
        return _Layer(
            attention_norm=self._convert(weights[f"{prefix}input_layernorm.weight"]),
            qkv=project("self_attn", "qkv"),
            qk_norm=qk_norm,
            output=project("self_attn", "o"),
            mlp_norm=self._convert(weights[f"{prefix}post_attention_layernorm.weight"]),
            gate_up=project("mlp", ("gate", "up")),
            down=project("mlp", ("down",)),
        )

    def extend(self, chunks: Sequence[PrefillChunk]) -> None:
        """Write the chunks' tokens to the cache; see `Forward.extend`. Tokens are packed, not padded."""
        device = self.kv_shape.device
        token_ids = torch.tensor([token for chunk in chunks for token in chunk.token_ids], device=device)
        spans = [(chunk.start, chunk.start + len(chunk.token_ids)) for chunk in chunks]
        positions = torch.cat([torch.arange(start, stop, device=device) for start, stop in spans])
        sizes = [stop - start for start, stop in spans]
        # Causal masks, [stop - start, stop]; None where the chunk starts its sequence.
        hidden = (self._cos.new_full((stop - start, stop), -torch.inf) for start, stop in spans)
        masks = [mask.triu_(start + 1) if start else None for mask, (start, _) in zip(hidden, spans, strict=True)]
        rope = self._cos[positions], self._sin[positions]
        x = functional.embedding(token_ids, self._embedding)
        for i, layer in enumerate(self._layers):
            q, k, v = self._qkv(x, layer, rope)
            both = torch.split(torch.stack([k, v]).transpose(1, 2), sizes, dim=2)
            for chunk, (start, stop), piece in zip(chunks, spans, both, strict=True):
                chunk.kv[2 * i : 2 * i + 2, :, start:stop] = piece
            if i == self._num_layers - 1:
                return  # the logits of these tokens are not needed
            attended = [
                self._attend_chunk(qi, chunk.kv[2 * i, :, :stop], chunk.kv[2 * i + 1, :, :stop], mask)
                for qi, chunk, (_, stop), mask in zip(torch.split(q, sizes), chunks, spans, masks, strict=True)
            ]
            x = self._finish_layer(x, torch.cat(attended), layer)

    def decode(self, groups: Sequence[LaneGroup]) -> Tensor:
        """Write the last tokens to the cache and return their logits; see `Forward.decode`."""
        device = self.kv_shape.device
        token_ids = torch.tensor([ids[-1] for group in groups for ids in group.sequences], device=device)
        positions = torch.tensor([len(ids) - 1 for group in groups for ids in group.sequences], device=device)
        batches = self._lane_batches(groups, positions)
        rope = self._cos[positions], self._sin[positions]
        x = functional.embedding(token_ids, self._embedding)
        for i, layer in enumerate(self._layers):
            q, k, v = self._qkv(x, layer, rope)
            attended = [self._attend_lanes(i, batch, q[batch.rows], k[batch.rows], v[batch.rows]) for batch in batches]
            x = self._finish_layer(x, attended[0] if len(attended) == 1 else torch.cat(attended), layer)
        x = functional.rms_norm(x, x.shape[-1:], self._final_norm, self._eps)
        return linear(x, self._head).float()

    def _lane_batches(self, groups: Sequence[LaneGroup], positions: Tensor) -> list[_LaneBatch]:
        batches, begin = [], 0
        for group in groups:
            size = len(group.sequences)
            rows = slice(begin, begin + size)
            begin += size
            length = max(map(len, group.sequences))
            shared = group.shared if self.kv_shape.dtype == torch.float32 else 0
            at = positions[rows]
            hidden = torch.arange(shared, length, device=at.device) > at[:, None]
            mask = torch.zeros(hidden.shape, dtype=group.kv.dtype, device=at.device).masked_fill_(hidden, -torch.inf)
            mask = mask[:, None, None].expand(-1, self._kv_heads, self._heads // self._kv_heads, -1)
            lanes = torch.arange(size, device=at.device)
            batches.append(_LaneBatch(group.kv, rows, lanes, at, shared, length, mask.flatten(0, 1).contiguous()))
        return batches

    def _qkv(self, x: Tensor, layer: _Layer, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [n, heads, head_dim], and keys and values [n, kv_heads, head_dim] of n tokens."""
        both = self._heads + self._kv_heads
        qkv = _project(functional.rms_norm(x, x.shape[-1:], layer.attention_norm, self._eps), layer.qkv)
        qkv = qkv.view(len(x), both + self._kv_heads, self._head_dim)
        qk = qkv[:, :both]
        if layer.qk_norm is not None:
            qk = functional.rms_norm(qk, (self._head_dim,), None, self._eps) * layer.qk_norm
        # The table has -sin in its lower half, so that "rotate half" is a plain roll.
        cos, sin = rope
        qk = torch.addcmul(qk * cos, qk.roll(self._head_dim // 2, -1), sin)
        return qk[:, : self._heads], qk[:, self._heads :], qkv[:, both:]

    def _attend_lanes(self, index: int, batch: _LaneBatch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write one new token per lane to the cache, and return its attention, [n, heads × head_dim]."""
        keys, values = batch.kv[2 * index], batch.kv[2 * index + 1]
        keys[batch.lanes, :, batch.positions] = k
        values[batch.lanes, :, batch.positions] = v
        first = keys[0, :, : batch.shared], values[0, :, : batch.shared]
        keys = keys.flatten(0, 1)[:, batch.shared : batch.length]
        values = values.flatten(0, 1)[:, batch.shared : batch.length]
        # Query heads that share a key-value head take the axis of query positions.
        q = q.reshape(len(keys), -1, self._head_dim)
        if q.dtype != torch.float32:
            attended = functional.scaled_dot_product_attention(
                q[None], keys[None], values[None], attn_mask=batch.mask[None]
            )
            return attended.reshape(len(batch.lanes), -1)
        # For so few queries, two matrix products are faster than the attention kernel.
        scores = torch.baddbmm(batch.mask, q, keys.transpose(1, 2), alpha=self._head_dim**-0.5)
        if batch.shared:
            shared_scores = self._by_lane(self._by_head(q * self._head_dim**-0.5) @ first[0].transpose(1, 2))
            weights = torch.cat([shared_scores, scores], dim=-1).softmax(-1)
            shared_scores, scores = weights[..., : batch.shared], weights[..., batch.shared :]
            attended = torch.baddbmm(self._by_lane(self._by_head(shared_scores) @ first[1]), scores, values)
        else:
            attended = torch.bmm(scores.softmax(-1), values)
        return attended.reshape(len(batch.lanes), -1)

    def _by_head(self, x: Tensor) -> Tensor:
        """Reshape [lanes × kv_heads, group, m] to [kv_heads, lanes × group, m]."""
        return torch.unflatten(x, 0, (-1, self._kv_heads)).transpose(0, 1).flatten(1, 2)

    def _by_lane(self, x: Tensor) -> Tensor:
        """Reshape [kv_heads, lanes × group, m] to [lanes × kv_heads, group, m]."""
        group = self._heads // self._kv_heads
        return torch.unflatten(x, 1, (-1, group)).transpose(0, 1).flatten(0, 1)

    def _attend_chunk(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Return the attention for n consecutive tokens in one sequence, [n, heads × head_dim].

        Args:
            q: [n, heads, head_dim].
            keys, values: [kv_heads, m, head_dim], of the whole sequence so far.
            mask: [n, m], 0 or -inf; None for causal attention with n = m.
        """
        q = q.transpose(0, 1)[None]
        if mask is None:
            gqa = self._heads != self._kv_heads
            attended = functional.scaled_dot_product_attention(
                q, keys[None], values[None], is_causal=True, enable_gqa=gqa
            )
        else:
            # With a mask, memory-efficient kernels do not support grouped heads on every device; copies are cheap.
            keys, values = (kv.repeat_interleave(self._heads // self._kv_heads, 0)[None] for kv in (keys, values))
            attended = functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return attended[0].transpose(0, 1).flatten(1)

    def _finish_layer(self, x: Tensor, attended: Tensor, layer: _Layer) -> Tensor:
        x = x + _project(attended, layer.output)
        gate, up = _project(functional.rms_norm(x, x.shape[-1:], layer.mlp_norm, self._eps), layer.gate_up).chunk(2, -1)
        return x + _project(functional.silu(gate).mul_(up), layer.down)


def _readable(weight: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return a weight for its checksum.

    Args:
        weight: packed or not, [rows, ...].
        sizes: the row counts of the weights that were joined into it.
    """
    if not weight.is_mkldnn:
        return weight
    memory = packed_memory(weight) if all(size % ROWS_PER_BLOCK == 0 for size in sizes) else None
    return unpack(weight) if memory is None else memory


def _project(x: Tensor, parts: _Projection) -> Tensor:
    if len(parts) == 1:
        return linear(x, *parts[0])
    return torch.cat([linear(x, weight, bias) for weight, bias in parts], dim=-1)


def _rope_table(model: PreTrainedModel, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines, and sines with the lower half negated, [length, 1, head_dim], of the model's frequencies."""
    rotary = model.model.rotary_emb
    inv_freq = rotary.inv_freq.float()
    angles = torch.arange(length, device=inv_freq.device).float()[:, None] * inv_freq
    cos, sin = angles.cos() * rotary.attention_scaling, angles.sin() * rotary.attention_scaling
    return torch.cat([cos, cos], -1)[:, None].to(dtype), torch.cat([-sin, sin], -1)[:, None].to(dtype)
