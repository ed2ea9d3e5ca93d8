"""Forward passes through transformers' modules, for any causal language model.

`CachedFallback` supports models whose only state is keys and values per token; it rebuilds their `DynamicCache` in
every step. `UncachedFallback` recomputes the whole sequence for each token, which is correct for any model, including
recurrent ones, but slow. `fallback_forward` tests `CachedFallback` on the model, and uses `UncachedFallback` if the
logits differ.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence

import torch
from loguru import logger
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from astuner.llm_engine.embedded.forward import Forward, KvShape, LaneGroup, PrefillChunk, WeightNames

_TRIAL_LENGTHS = (4, 7)


def fallback_forward(model: PreTrainedModel) -> Forward:
    """Return the fastest forward pass that is correct for `model`. Sets `model` to evaluation mode."""
    model.eval()
    uncached = UncachedFallback(model)
    # A model may raise any exception for a cache that it does not support.
    try:
        cached = CachedFallback(model)
        difference = _logit_difference(cached, uncached)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    else:
        tolerance = 1e-3 if model.dtype == torch.float32 else 0.1
        if difference < tolerance:
            return cached
        reason = f"its logits with a KV cache differ by {difference:.2g} of their standard deviation"
    logger.warning(
        "{} does not support a plain KV cache ({}); sampling is slow, because every token recomputes its sequence",
        type(model).__name__,
        reason,
    )
    return uncached


def _logit_difference(cached: CachedFallback, uncached: UncachedFallback) -> float:
    """Return the largest logit difference on unequally long sequences, relative to the logits' standard deviation."""
    sequences = [[(7 * i + n) % cached.vocab_size for i in range(n)] for n in _TRIAL_LENGTHS]
    shape = cached.kv_shape
    kv = torch.zeros(1, len(sequences), 1, max(_TRIAL_LENGTHS), shape.width, dtype=shape.dtype, device=shape.device)
    with torch.inference_mode():
        group = [LaneGroup(kv, sequences)]
        expected = uncached.decode(group)
        cached.extend([PrefillChunk(kv[:, i], ids[:2], 0) for i, ids in enumerate(sequences)])
        cached.extend([PrefillChunk(kv[:, i], ids[2:-1], 2) for i, ids in enumerate(sequences)])
        return float((cached.decode(group) - expected).abs().max() / expected.std())


class _Fallback:
    """Base class of both fallbacks: the model, its weights, and the arguments that it accepts."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._names = WeightNames(model)
        self._accepts = inspect.signature(model.forward).parameters.keys()
        self._device = model.get_input_embeddings().weight.device
        self.vocab_size = int(model.get_input_embeddings().weight.shape[0])

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Load new weights into the model; see `Forward.load`."""
        self._names.copy_into_model(self._names.resolve(weights))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of the model; see `Forward.weights`."""
        yield from self._model.state_dict().items()

    def _last_logits(self, **arguments: object) -> Tensor:
        """Return the logits at the last position, [batch, vocab_size] float32."""
        arguments["logits_to_keep"] = 1
        accepted = {name: value for name, value in arguments.items() if name in self._accepts}
        logits: Tensor = self._model(**accepted).logits
        return logits[:, -1].float()


class UncachedFallback(_Fallback):
    """A `Forward` without a KV cache: it recomputes the whole sequence for each token."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.kv_shape = KvShape(1, 1, 0, model.dtype, self._device)

    def extend(self, chunks: Sequence[PrefillChunk]) -> None:
        """Do nothing: there is no cache."""

    def decode(self, groups: Sequence[LaneGroup]) -> Tensor:
        """Return the logits after each sequence; see `Forward.decode`."""
        sequences = [ids for group in groups for ids in group.sequences]
        inputs = (torch.tensor([ids], device=self._device) for ids in sequences)
        return torch.cat([self._last_logits(input_ids=ids, use_cache=False) for ids in inputs])


class CachedFallback(_Fallback):
    """A `Forward` with a KV cache, for models whose only state is keys and values per token.

    A lane stores, per token, the concatenated keys and values of all layers. Prompts are prefilled one at a time. A
    decode step pads its sequences on the left, which changes neither positions nor the distances of sliding windows.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        cache = DynamicCache()
        with torch.inference_mode():
            self._model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=self._device), past_key_values=cache)
        sizes = [layer_kv.shape for layer in cache.layers for layer_kv in (layer.keys, layer.values)]
        # (heads, width) of layer 0's keys, its values, layer 1's keys, and so on.
        self._parts = [(size[1], size[3]) for size in sizes]
        self._widths = [heads * width for heads, width in self._parts]
        self.kv_shape = KvShape(1, 1, sum(self._widths), cache.layers[0].keys.dtype, self._device)

    def extend(self, chunks: Sequence[PrefillChunk]) -> None:
        """Write the chunks' tokens to the cache; see `Forward.extend`."""
        for chunk in chunks:
            stop = chunk.start + len(chunk.token_ids)
            cache = self._cache(chunk.kv[0, :, : chunk.start])
            self._last_logits(
                input_ids=torch.tensor([chunk.token_ids], device=self._device),
                attention_mask=torch.ones(1, stop, dtype=torch.long, device=self._device),
                position_ids=torch.arange(chunk.start, stop, device=self._device)[None],
                past_key_values=cache,
                use_cache=True,
            )
            chunk.kv[0, 0, chunk.start : stop] = self._newest(cache, len(chunk.token_ids))[0]

    def decode(self, groups: Sequence[LaneGroup]) -> Tensor:
        """Write the last tokens to the cache and return their logits; see `Forward.decode`."""
        return torch.cat([self._decode_group(group.kv[0, :, 0], group.sequences) for group in groups])

    def _decode_group(self, kv: Tensor, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Implement `decode` for lanes [n, capacity, width]."""
        lanes = torch.arange(len(sequences), device=self._device)
        cached = torch.tensor([len(ids) - 1 for ids in sequences], device=self._device)
        longest = max(map(len, sequences)) - 1
        # Right-aligned: column c of lane i is position c - (longest - cached[i]).
        positions = torch.arange(longest + 1, device=self._device) - (longest - cached)[:, None]
        cache = self._cache(kv[lanes[:, None], positions[:, :-1].clamp(min=0)])
        logits = self._last_logits(
            input_ids=torch.tensor([[ids[-1]] for ids in sequences], device=self._device),
            attention_mask=(positions >= 0).long(),
            position_ids=cached[:, None],
            past_key_values=cache,
            use_cache=True,
        )
        kv[lanes, cached] = self._newest(cache, 1)[:, 0]
        return logits

    def _cache(self, kv: Tensor) -> DynamicCache:
        """Return a transformers cache of [batch, tokens, width]. Layers with sliding windows keep all tokens too."""
        if kv.shape[1] == 0:
            return DynamicCache()
        parts = [
            part.view(*part.shape[:2], *size).transpose(1, 2)
            for part, size in zip(torch.split(kv, self._widths, dim=-1), self._parts, strict=True)
        ]
        return DynamicCache(list(zip(parts[::2], parts[1::2], strict=True)))

    def _newest(self, cache: DynamicCache, num_tokens: int) -> Tensor:
        """Return the last `num_tokens` tokens of a cache, [batch, num_tokens, width]."""
        parts = [part[:, :, -num_tokens:] for layer in cache.layers for part in (layer.keys, layer.values)]
        return torch.cat([part.transpose(1, 2).flatten(2) for part in parts], dim=-1)
