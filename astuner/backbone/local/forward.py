"""Micro-batches of training rows, and their tokens' log-probabilities under a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from astuner.algorithms.kl import differentiable_entropy, entropy_from_logprobs
from astuner.algorithms.policy_batch import CallTable
from astuner.algorithms.training_rows import TrainingRow, token_advantages, token_temperatures
from astuner.backbone.packing.packed_attention import packed_logits
from astuner.backbone.packing.row_bins import RowBin, padded_bins, padded_budget, prefix_bins
from astuner.context_tracker.packing import Packing, encode_ids


@dataclass(frozen=True)
class MicroBatch:
    """B rows padded on the right to a common length T.

    Attributes:
        token_ids: [B, T] int64, padded with 0.
        present: [B, T] bool, False for padding.
        train_counts: [B, T] int64.
        logprobs: [B, T] float32, as sampled, 0 where not sampled.
        sampler_logprobs: [B, T] float32, those after top-p, top-k, penalties and constraints.
        old_logprobs: [B, T] float32, the denominators of the ratios.
        advantages: [B, T] float32, of the call that each trained token belongs to.
        episodes: [B] int64.
        rows: indices of its rows in the list that was split.
        computed_tokens: number of tokens that a forward pass computes, including padding.
        temperature: the sampling temperature of its calls; if they differ, that of each token, [B, T] float32; None for
            transcripts.
        packing: the packing of its rows, if each distinct prefix is computed once.
    """

    token_ids: Tensor
    present: Tensor
    train_counts: Tensor
    logprobs: Tensor
    sampler_logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    calls: CallTable
    episodes: Tensor
    rows: tuple[int, ...]
    computed_tokens: int
    temperature: Tensor | float | None = None
    packing: Packing | None = None


def micro_batches(
    rows: Sequence[TrainingRow],
    token_budget: int,
    device: torch.device,
    should_pack: Callable[[Packing], bool] | None = None,
) -> list[MicroBatch]:
    """Split rows into micro-batches.

    Args:
        token_budget: maximum number of tokens of a micro-batch, including padding; a longer row is a
            separate micro-batch.
        should_pack: returns whether to compute a packing instead of padded rows; None packs nothing.

    Returns:
        Micro-batches, in an order that depends on the rows only.
    """
    lengths = [len(row.token_ids) for row in rows]
    bins: list[RowBin] = []
    separate: list[list[int]] = [list(range(len(rows)))]
    if should_pack is not None:
        bins, separate = prefix_bins([encode_ids(row.token_ids) for row in rows], token_budget, should_pack)
    for group in separate:
        bins += padded_bins(group, lengths, padded_budget(token_budget, device))
    return [_pad(rows, row_bin, device) for row_bin in bins]


def _pad(rows: Sequence[TrainingRow], row_bin: RowBin, device: torch.device) -> MicroBatch:
    chosen = row_bin.rows
    length = max(len(rows[index].token_ids) for index in chosen)

    def padded(field: str, dtype: torch.dtype, default: str = "") -> Tensor:
        """Return a field of the rows, or field `default` for rows without it."""
        table = torch.zeros((len(chosen), length), dtype=dtype)
        for place, index in enumerate(chosen):
            values = getattr(rows[index], field)
            values = values if len(values) or not default else getattr(rows[index], default)
            table[place, : len(values)] = torch.from_numpy(np.asarray(values)).to(dtype)
        return table.to(device)

    lengths = torch.tensor([len(rows[index].token_ids) for index in chosen])
    calls = [(place, start, end) for place, index in enumerate(chosen) for start, end in rows[index].calls]
    columns = torch.tensor(calls, dtype=torch.int64, device=device).reshape(-1, 3).unbind(1)
    temperature = token_temperatures([rows[index] for index in chosen], length)
    return MicroBatch(
        token_ids=padded("token_ids", torch.int64),
        present=(torch.arange(length) < lengths[:, None]).to(device),
        train_counts=padded("train_counts", torch.int64),
        logprobs=padded("logprobs", torch.float32),
        sampler_logprobs=padded("sampler_logprobs", torch.float32, "logprobs"),
        old_logprobs=padded("old_logprobs", torch.float32, "logprobs"),
        advantages=token_advantages([rows[index] for index in chosen], length).to(device),
        calls=CallTable(*columns),
        episodes=torch.tensor([rows[index].episode for index in chosen], device=device),
        rows=chosen,
        computed_tokens=row_bin.tokens,
        temperature=temperature.to(device) if isinstance(temperature, Tensor) else temperature,
        packing=row_bin.packing,
    )


# On a CPU: small enough for its cache, large enough for all of its cores. On a GPU: few kernels, in 64 MiB.
_CHUNK_ELEMENTS_CPU = 2**21
_CHUNK_ELEMENTS_GPU = 2**24


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
    if isinstance(temperature, Tensor):
        logits, index = _scaled(logits.float(), index, temperature[rows, columns])
        temperature = 1.0
    chosen_ids, temperature = token_ids[rows, columns], temperature or 1.0
    if entropy_gradient:
        logprobs = torch.log_softmax(_divided(logits, temperature), dim=-1)
        chosen, entropies = logprobs[index, chosen_ids], differentiable_entropy(logprobs)
    else:
        chosen, entropies = _ChosenLogprobs.apply(logits, index, chosen_ids, temperature)  # type: ignore[no-untyped-call]
    empty = torch.zeros(token_ids.shape, device=token_ids.device)
    return empty.index_put((rows, columns), chosen), empty.index_put((rows, columns), entropies[index])


class _ChosenLogprobs(torch.autograd.Function):
    """Log-probabilities of tokens, and entropies without gradient.

    The distributions are computed in chunks, and again in the backward pass, so that only the logits and their gradient
    are held, in the dtype of the model. For large vocabularies, the other copies would take most of the memory, and as
    much time as a third of the layers.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, index: Tensor, token_ids: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities, [tokens], and the entropies, [positions], of logits [positions, vocabulary]."""
        ctx.save_for_backward(logits, index, token_ids)
        ctx.temperature = temperature
        chosen = torch.empty(len(index), device=logits.device)
        entropies = torch.empty(len(logits), device=logits.device)
        for start, chunk in _chunks(logits):
            logprobs = torch.log_softmax(_divided(chunk, temperature), dim=-1)
            here = _within(index, start, len(chunk))
            chosen[here] = logprobs[index[here] - start, token_ids[here]]
            entropies[start : start + len(chunk)] = entropy_from_logprobs(logprobs)
        ctx.mark_non_differentiable(entropies)
        return chosen, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the logits, in their dtype."""
        logits, index, token_ids = ctx.saved_tensors
        grad = grad / ctx.temperature
        sums = torch.zeros(len(logits), device=logits.device).index_add_(0, index, grad)
        result = torch.empty_like(logits)
        for start, chunk in _chunks(logits):
            of_logits = torch.softmax(_divided(chunk, ctx.temperature), dim=-1)
            of_logits *= -sums[start : start + len(chunk), None]
            here = _within(index, start, len(chunk))
            of_logits.index_put_((index[here] - start, token_ids[here]), grad[here], accumulate=True)
            result[start : start + len(chunk)] = of_logits
        return result, None, None, None


def _divided(logits: Tensor, temperature: float) -> Tensor:
    return logits.float() if temperature == 1 else logits.float() / temperature


def _chunks(logits: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield chunks of rows, each with its first row's index."""
    elements = _CHUNK_ELEMENTS_CPU if logits.device.type == "cpu" else _CHUNK_ELEMENTS_GPU
    size = max(elements // logits.shape[1], 1)
    for start in range(0, len(logits), size):
        yield start, logits[start : start + size]


def _within(index: Tensor, start: int, size: int) -> Tensor:
    return ((index >= start) & (index < start + size)).nonzero()[:, 0]


def _scaled(logits: Tensor, index: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits divided by each temperature that a token at their position has.

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
