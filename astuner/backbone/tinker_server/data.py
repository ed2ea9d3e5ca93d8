"""Data as the wire brings them, checked, and cut into batches of rows of like length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from astuner.backbone.tinker_server import wire
from astuner.backbone.tinker_server.losses import Loss, find_loss, options_of
from astuner.backbone.tinker_server.refusal import Refusal

_MOST_TOKENS = 8192
# The logits of a batch are the largest thing in memory: at most a gibibyte of them in float32.
_MOST_LOGITS = 2**28


@dataclass(frozen=True)
class Row:
    """A sequence to compute.

    Attributes:
        ids: N token ids.
        targets: N token ids: what should follow each.
        inputs: of the loss, N numbers each.
    """

    ids: NDArray[np.int64]
    targets: NDArray[np.int64]
    inputs: Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Pass:
    """What one forward or forward-backward request asks for."""

    rows: Sequence[Row]
    loss: Loss
    options: Mapping[str, float]


@dataclass(frozen=True)
class Batch:
    """Rows computed at once, the longest first.

    Attributes:
        indices: which rows of the pass they are.
        ids: [B, T] int64, padded on the right.
        sizes: B lengths.
        targets: [M] int64, those of all rows in turn; M is the sum of the lengths.
        inputs: of the loss, [M] float32 each.
    """

    indices: Sequence[int]
    ids: Tensor
    sizes: Sequence[int]
    targets: Tensor
    inputs: Mapping[str, Tensor]


def checked(given: wire.ForwardBackwardInput, vocab_size: int, max_length: int) -> Pass:
    """Return what a request asks for.

    Raises:
        Refusal: anything in it does not fit the loss or the model.
    """
    loss = find_loss(given.loss_fn)
    options = options_of(given.loss_fn, given.loss_fn_config)
    if not given.data:
        raise Refusal("the request has no data; send at least one Datum")
    rows = []
    for index, datum in enumerate(given.data):
        try:
            rows.append(_row(datum, given.loss_fn, loss, vocab_size, max_length))
        except Refusal as refusal:
            raise Refusal(f"datum {index} of {len(given.data)}: {refusal}") from None
    return Pass(rows, loss, options)


def _row(datum: wire.Datum, name: str, loss: Loss, vocab_size: int, max_length: int) -> Row:
    ids = checked_ids(datum.model_input.ids, "model_input", vocab_size, max_length)
    given = datum.loss_fn_inputs
    needed = ("target_tokens", *loss.inputs)
    missing = [key for key in needed if key not in given]
    unknown = [key for key in given if key not in (*needed, *loss.optional)]
    if missing or unknown:
        wrong = [f"{key} is missing" for key in missing] + [f"{key} is not among them" for key in unknown]
        takes = ", ".join((*needed, *(f"{key} (optional)" for key in loss.optional)))
        raise Refusal(f"{name} takes the inputs {takes}; {', '.join(wrong)}")
    tensors = {key: _dense(key, tensor, len(ids)) for key, tensor in given.items()}
    targets = checked_ids(tensors.pop("target_tokens").tolist(), "target_tokens", vocab_size, max_length)
    ones = np.ones(len(ids))
    inputs = {key: tensors.get(key, ones).astype(np.float32) for key in (*loss.inputs, *loss.optional)}
    return Row(ids, targets, inputs)


def checked_ids(ids: Sequence[float], what: str, vocab_size: int, max_length: int) -> NDArray[np.int64]:
    """Return token ids as an array.

    Raises:
        Refusal: none, too many, or not of the vocabulary.
    """
    if not 0 < len(ids) <= max_length:
        raise Refusal(f"{what} has {len(ids)} tokens; 1 to {max_length} are possible with this model")
    array = np.asarray(ids, dtype=np.float64)
    if not ((array >= 0) & (array < vocab_size) & (array == np.floor(array))).all():
        raise Refusal(
            f"{what} has token ids from {array.min():g} to {array.max():g}; the model knows 0 to {vocab_size - 1}; is "
            "the tokenizer the model's own?"
        )
    return array.astype(np.int64)


def _dense(key: str, tensor: wire.TensorData, length: int) -> NDArray[np.float64]:
    if tensor.sparse_crow_indices is not None or len(tensor.shape or [length]) != 1:
        raise Refusal(f"{key} has shape {tensor.shape}; this server takes dense tensors with one number a token")
    if len(tensor.data) != length:
        raise Refusal(f"{key} has {len(tensor.data)} numbers, model_input has {length} tokens; send one a token")
    values = np.asarray(tensor.data, dtype=np.float64)
    if not np.isfinite(values).all():
        raise Refusal(f"{key} has numbers that are not finite")
    return values


def batches(asked: Pass, vocab_size: int, device: torch.device) -> Iterator[Batch]:
    """Cut the rows of a pass into batches, whose padding and memory are bounded."""
    budget = min(_MOST_TOKENS, max(1, _MOST_LOGITS // vocab_size))
    order = sorted(range(len(asked.rows)), key=lambda index: -len(asked.rows[index].ids))
    while order:
        fitting = max(1, budget // len(asked.rows[order[0]].ids))
        indices, order = order[:fitting], order[fitting:]
        rows = [asked.rows[index] for index in indices]
        padded = np.zeros((len(rows), len(rows[0].ids)), dtype=np.int64)
        for line, row in zip(padded, rows, strict=True):
            line[: len(row.ids)] = row.ids
        yield Batch(
            indices,
            torch.from_numpy(padded).to(device),
            [len(row.ids) for row in rows],
            torch.from_numpy(np.concatenate([row.targets for row in rows])).to(device),
            {
                key: torch.from_numpy(np.concatenate([row.inputs[key] for row in rows])).to(device)
                for key in rows[0].inputs
            },
        )
