"""Lays out a training batch for verl's workers: each row's tensors, and each worker's rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, DTypeLike, NDArray
from torch import Tensor

from astuner.algorithms.training_rows import TrainingRow, prompt_length, token_advantages
from astuner.context_tracker.packing import in_prefix_order
from astuner.schema import CallSpan, Packed, Sample, pack_ints

RowFields = Mapping[str, Tensor]
"""Tensors of one row, by the name of their TransferQueue field."""

PADDING_LENGTH = 2
"""Tokens of a padding row."""

# A request to TransferQueue, and what is copied for it, must not grow with the number of rows.
_CHUNK_BYTES = 2**24


def row_chunks(rows: Iterable[RowFields], limit: int = _CHUNK_BYTES) -> Iterator[list[RowFields]]:
    """Yield consecutive lists of rows, each with at most `limit` bytes or one row. Rows are read only when needed."""
    chunk: list[RowFields] = []
    size = 0
    for row in rows:
        row_size = sum(value.nbytes for value in row.values())
        if chunk and size + row_size > limit:
            yield chunk
            chunk, size = [], 0
        chunk.append(row)
        size += row_size
    if chunk:
        yield chunk


def length_chunks(lengths: Sequence[int], limit: int = _CHUNK_BYTES // 8) -> Iterator[range]:
    """Yield consecutive ranges of row numbers, each with at most `limit` tokens or one row."""
    start = size = 0
    for number, length in enumerate(lengths):
        if number > start and size + length > limit:
            yield range(start, number)
            start, size = number, 0
        size += length
    if start < len(lengths):
        yield range(start, len(lengths))


def assign_rows(
    mini_batches: Sequence[Sequence[int]], lengths: Sequence[int], workers: int, encoded: Sequence[bytes] = ()
) -> list[list[list[int | None]]]:
    """Distribute the rows of each mini-batch over the data-parallel workers.

    verl splits a batch into equal parts, one per worker, and each part into mini-batches of equal size. Padding rows,
    which train nothing, make any number of rows divisible.

    Args:
        encoded: the token ids of the rows, as `encode_ids` returns them, if workers compute common prefixes once.

    Returns:
        Row numbers by worker and mini-batch, with None for a padding row. All lists of row numbers have the same
        length. The workers' numbers of tokens are balanced; with `encoded`, those of distinct prefixes.
    """
    if encoded:
        divided = [_by_prefix(rows, encoded, workers) for rows in mini_batches]
    else:
        most = max(-(-len(rows) // workers) for rows in mini_batches)
        divided = [_by_length(rows, lengths, workers, most) for rows in mini_batches]
    size = max(len(part) for parts in divided for part in parts)
    return [[[*parts[worker], *[None] * (size - len(parts[worker]))] for parts in divided] for worker in range(workers)]


def _by_length(rows: Sequence[int], lengths: Sequence[int], workers: int, size: int) -> list[list[int]]:
    """Divide rows into at most `size` for each worker, with about equally many tokens."""
    parts: list[list[int]] = [[] for _ in range(workers)]
    totals = [0] * workers
    for row in sorted(rows, key=lambda row: (-lengths[row], row)):
        # Greedy: the longest remaining row goes to the worker with the fewest tokens that has a free slot.
        worker = min((w for w in range(workers) if len(parts[w]) < size), key=lambda w: (totals[w], w))
        parts[worker].append(row)
        totals[worker] += lengths[row]
    return parts


def _by_prefix(rows: Sequence[int], encoded: Sequence[bytes], workers: int) -> list[list[int]]:
    """Divide rows in the order of their tokens, which keeps rows with a common prefix together."""
    rows = sorted(rows)
    ordered = in_prefix_order([encoded[row] for row in rows])
    parts: list[list[int]] = [[] for _ in range(workers)]
    computed, total = 0, sum(new_tokens for _, new_tokens in ordered)
    for index, new_tokens in ordered:
        # A row belongs to the worker in whose share the middle of its new tokens is.
        parts[(2 * computed + new_tokens) * workers // (2 * total + 1)].append(rows[index])
        computed += new_tokens
    return parts


def sample_fields(sample: Sample) -> RowFields:
    """Return the fields of a sample. The tokens before the first trained token are the prompt, the rest the response.

    Args:
        sample: a sample of P + R tokens, of which the first P are the prompt.

    Returns:
        `prompts` [P], `responses` [R] and `position_ids` [P + R] int32; `input_ids` [P + R] int64, with which verl
        indexes the logits; `response_mask` and `loss_mask` [R] int32, the number of times that each token is trained;
        `rollout_log_probs` [R] float32.
    """
    start = prompt_length(sample)
    ids, mask = column(sample.token_ids, np.int32), response_counts(sample)
    return {
        "prompts": ids[:start],
        "responses": ids[start:],
        "input_ids": ids.long(),
        "position_ids": column(sample.position_ids, np.int32),
        "response_mask": mask,
        "loss_mask": mask,
        "rollout_log_probs": response_logprobs(sample),
    }


def response_counts(sample: Sample) -> Tensor:
    """Return how many times each response token is trained, [R] int32."""
    return column(sample.train_counts, np.int32)[prompt_length(sample) :]


def response_logprobs(sample: Sample) -> Tensor:
    """Return the sampler's logprobs of the response, [R] float32."""
    return column(sample.logprobs, np.float32)[prompt_length(sample) :]


def column(values: ArrayLike, dtype: DTypeLike) -> Tensor:
    """Return numbers as a new tensor."""
    return torch.from_numpy(np.array(values, dtype))


def scored_sample(token_ids: Sequence[int] | NDArray[np.int32], start: int) -> Sample:
    """Return a sample whose tokens from index `start` on are to be scored."""
    size = len(token_ids)
    counts, positions = Packed[int]([(0, 0, start), (1, 0, size - start)]), Packed[int]([(range(size), 0, size)])
    logprobs, span = Packed[float]([(0.0, 0, size)]), CallSpan("scored", start, size)
    return Sample(pack_ints(np.asarray(token_ids).tolist()), counts, logprobs, positions, 1.0, (span,))


def padding_sample_fields(token_id: int) -> RowFields:
    """Return the fields of `sample_fields` for a padding row: the shortest possible row, with no trained token."""
    return {
        "prompts": torch.tensor([token_id], dtype=torch.int32),
        "responses": torch.tensor([token_id], dtype=torch.int32),
        "input_ids": torch.tensor([token_id] * PADDING_LENGTH),
        "position_ids": torch.arange(PADDING_LENGTH, dtype=torch.int32),
        "response_mask": torch.zeros(1, dtype=torch.int32),
        "loss_mask": torch.zeros(1, dtype=torch.int32),
        "rollout_log_probs": torch.zeros(1),
    }


def loss_fields(
    row: TrainingRow, number: int, prompt: int, old_logprobs: Tensor, scale: float, mini_batch: int
) -> RowFields:
    """Return the fields that the loss needs in addition to `sample_fields`.

    Args:
        old_logprobs: [R] float32.
        scale: factor of the row's loss mask.
        mini_batch: index of the row's mini-batch in the step.

    Returns:
        `advantages`, `old_log_probs` and `sampler_log_probs` [R] float32; `call_starts` and `call_ends` [calls] int64,
        positions in the response; and the scalars `row_scale` (float32), `mini_batch` and `row` (int64, the row's
        index).
    """
    calls = torch.tensor(row.calls, dtype=torch.int64).reshape(-1, 2) - prompt
    sampled = row.sampler_logprobs if len(row.sampler_logprobs) else row.logprobs
    return {
        "advantages": token_advantages([row], len(row.token_ids))[0, prompt:],
        "old_log_probs": old_logprobs,
        "sampler_log_probs": column(sampled, np.float32)[prompt:],
        "call_starts": calls[:, 0].contiguous(),
        "call_ends": calls[:, 1].contiguous(),
        "row_scale": torch.tensor(scale, dtype=torch.float32),
        "mini_batch": torch.tensor(mini_batch),
        "row": torch.tensor(number),
    }


def padding_loss_fields(mini_batch: int, *, reference: bool) -> RowFields:
    """Return the fields of `loss_fields` for a padding row; with `reference`, including `ref_log_prob`."""
    fields = {
        "advantages": torch.zeros(1),
        "old_log_probs": torch.zeros(1),
        "sampler_log_probs": torch.zeros(1),
        # One call of length 0: TransferQueue treats a field without elements as missing.
        "call_starts": torch.zeros(1, dtype=torch.int64),
        "call_ends": torch.zeros(1, dtype=torch.int64),
        "row_scale": torch.tensor(0.0),
        "mini_batch": torch.tensor(mini_batch),
        "row": torch.tensor(-1),
    }
    return fields | {"ref_log_prob": torch.zeros(1)} if reference else fields
