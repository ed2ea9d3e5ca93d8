"""Training rows as padded tensors, split into micro-batches by a token budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from astuner.algorithms import CallTable
from astuner.algorithms.training_rows import TrainingRow, token_advantages, token_temperatures
from astuner.backbone.packing.row_bins import RowBin, padded_bins, padded_budget, prefix_bins
from astuner.context_tracker import Packing, encode_ids


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
        rows: the rows to train on.
        token_budget: maximum number of tokens of a micro-batch, including padding; a longer row is a
            separate micro-batch.
        device: the device of the tensors.
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
        rows=chosen,
        computed_tokens=row_bin.tokens,
        temperature=temperature.to(device) if isinstance(temperature, Tensor) else temperature,
        packing=row_bin.packing,
    )
