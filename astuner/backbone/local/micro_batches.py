"""Training rows as padded tensors, split into micro-batches by a token budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from astuner.algorithms import CallTable
from astuner.algorithms.training_rows import TrainingRow, token_advantages, token_temperatures
from astuner.context_tracker import ID_BYTES, Packing, encode_ids, pack_encoded, shared_prefix_length

# Tokens of a padded micro-batch. A CPU gains nothing from more: it has no idle units to fill, and its caches overflow.
_MOST_PADDED_ON_CPU = 4096


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
        calls: the position of the completion of each LLM call.
        episodes: [B] int64.
        rows: indices of its rows in the list that was split.
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
        rows: the rows to train on.
        token_budget: maximum number of tokens of a micro-batch, including padding; a longer row is a
            separate micro-batch.
        device: the device of the tensors.
        should_pack: returns whether to compute a packing instead of padded rows; None packs nothing.

    Returns:
        Micro-batches, in an order that depends on the rows only.
    """
    if should_pack is None:
        return _padded_batches(rows, range(len(rows)), padded_budget(token_budget, device), device)
    encoded = [encode_ids(row.token_ids) for row in rows]
    batches: list[MicroBatch] = []
    for chosen in _prefix_groups(encoded, token_budget):
        packing = pack_encoded([encoded[index] for index in chosen])
        if should_pack(packing):
            batches.append(_pad(rows, chosen, device, packing))
        else:
            batches += _padded_batches(rows, chosen, padded_budget(token_budget, device), device)
    return batches


def padded_budget(token_budget: int, device: torch.device) -> int:
    """Return the maximum number of tokens of a padded micro-batch, for a budget of `token_budget` tokens."""
    return min(token_budget, _MOST_PADDED_ON_CPU) if device.type == "cpu" else token_budget


def _prefix_groups(encoded: Sequence[bytes], token_budget: int) -> list[list[int]]:
    """Split rows into groups of at most `token_budget` distinct prefixes; rows with a common prefix stay together."""
    parts: list[list[int]] = []
    total = 0
    for index in sorted(range(len(encoded)), key=lambda index: (encoded[index], index)):
        length = len(encoded[index]) // ID_BYTES
        new = length - shared_prefix_length(encoded[parts[-1][-1]], encoded[index]) if parts else length
        if parts and total + new <= token_budget:
            parts[-1].append(index)
            total += new
        else:
            parts.append([index])
            total = length
    return parts


def _padded_batches(
    rows: Sequence[TrainingRow], chosen: Sequence[int], token_budget: int, device: torch.device
) -> list[MicroBatch]:
    """Group rows of similar length, which minimises padding."""
    order = sorted(chosen, key=lambda index: (-len(rows[index].token_ids), index))
    batches: list[MicroBatch] = []
    current: list[int] = []
    for index in order:
        longest = len(rows[current[0]].token_ids) if current else 0
        if current and longest * (len(current) + 1) > token_budget:
            batches.append(_pad(rows, current, device))
            current = []
        current.append(index)
    if current:
        batches.append(_pad(rows, current, device))
    return batches


def _pad(
    rows: Sequence[TrainingRow], chosen: Sequence[int], device: torch.device, packing: Packing | None = None
) -> MicroBatch:
    length = max(len(rows[index].token_ids) for index in chosen)

    def padded(field: str, dtype: torch.dtype, default: str = "") -> Tensor:
        """Return a field of the rows; `default` is the field of rows that lack the first."""
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
        rows=tuple(chosen),
        temperature=temperature.to(device) if isinstance(temperature, Tensor) else temperature,
        packing=packing,
    )
