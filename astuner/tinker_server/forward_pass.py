"""Forward passes: the losses that clients may select, and validation and batching of their data.

The losses follow Tinker's documentation (https://tinker-docs.thinkingmachines.ai/losses). Each is a sum over tokens;
clients apply any weighting of tokens and sequences themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from astuner.backbone.training.tinker_policy import batch_tokens
from astuner.tinker_server import wire
from astuner.tinker_server.wire import TinkerRequestError

STABLE_REINFORCE = "stable_reinforce needs information that only samplers of the Tinker service record"
_Inputs = Mapping[str, Tensor]
_Options = Mapping[str, float]


@dataclass(frozen=True)
class TinkerLoss:
    """A loss.

    Attributes:
        inputs: required inputs of a datum in addition to `target_tokens`, one number per token.
        optional: optional inputs; they default to 1 per token.
        options: keys of `loss_fn_config` with their defaults.
        compute: maps one sequence's target log-probabilities [N], the inputs [N] and the options to each token's loss
            [N].
    """

    inputs: tuple[str, ...]
    optional: tuple[str, ...]
    options: _Options
    compute: Callable[[Tensor, _Inputs, _Options], Tensor]


def _ratio(logprobs: Tensor, inputs: _Inputs) -> Tensor:
    return torch.exp(logprobs - inputs["logprobs"])


def _ppo(logprobs: Tensor, inputs: _Inputs, options: _Options) -> Tensor:
    """Return the PPO loss per token: the clipped objective of Schulman et al. 2017 (arXiv:1707.06347)."""
    ratio = _ratio(logprobs, inputs)
    clipped = ratio.clamp(options["clip_low_threshold"], options["clip_high_threshold"])
    return -torch.minimum(ratio * inputs["advantages"], clipped * inputs["advantages"])


def _cispo(logprobs: Tensor, inputs: _Inputs, options: _Options) -> Tensor:
    """Return the CISPO loss per token: REINFORCE, weighted by the detached clipped ratio (arXiv:2506.13585)."""
    ratio = _ratio(logprobs.detach(), inputs)
    clipped = ratio.clamp(options["clip_low_threshold"], options["clip_high_threshold"])
    return -clipped * logprobs * inputs["advantages"]


def _dro(logprobs: Tensor, inputs: _Inputs, options: _Options) -> Tensor:
    """Return the DRO loss per token: REINFORCE with a quadratic penalty on the log-ratio (arXiv:2405.19107)."""
    penalty = 0.5 * options["beta"] * (logprobs - inputs["logprobs"]) ** 2
    return penalty - logprobs * inputs["advantages"]


def _gspo(logprobs: Tensor, inputs: _Inputs, options: _Options) -> Tensor:
    """Return the GSPO-token loss per token (arXiv:2507.18071, section 4.3).

    Each ratio equals the sequence's ratio, but its gradient comes from the token's own log-probability. The sequence's
    ratio is the geometric mean over the tokens whose `sequence_ratio_mask` is not 0.
    """
    in_ratio = inputs["sequence_ratio_mask"] != 0
    log_ratio = (logprobs.detach() - inputs["logprobs"])[in_ratio].sum() / in_ratio.sum().clamp(min=1)
    ratio = torch.exp(log_ratio + logprobs - logprobs.detach())
    clipped = ratio.clamp(options["clip_low_threshold"], options["clip_high_threshold"])
    return -torch.minimum(ratio * inputs["advantages"], clipped * inputs["advantages"])


_SAMPLE_INPUTS = ("logprobs", "advantages")
_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES: Mapping[str, TinkerLoss] = {
    "cross_entropy": TinkerLoss((), ("weights",), {}, lambda logprobs, inputs, _: -logprobs * inputs["weights"]),
    "importance_sampling": TinkerLoss(
        _SAMPLE_INPUTS, (), {}, lambda logprobs, inputs, _: -_ratio(logprobs, inputs) * inputs["advantages"]
    ),
    "ppo": TinkerLoss(_SAMPLE_INPUTS, (), _CLIP, _ppo),
    "cispo": TinkerLoss(_SAMPLE_INPUTS, (), _CLIP, _cispo),
    "dro": TinkerLoss(_SAMPLE_INPUTS, (), {"beta": 0.05}, _dro),
    "gspo": TinkerLoss((*_SAMPLE_INPUTS, "sequence_ratio_mask"), (), _CLIP, _gspo),
}


@dataclass(frozen=True)
class DatumRow:
    """A sequence: N token ids, the target at each position, and N numbers for each input of the loss."""

    ids: NDArray[np.int64]
    targets: NDArray[np.int64]
    inputs: Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True)
class ForwardPass:
    """The validated input of a forward or forward-backward request; `options` are the loss's, defaults included."""

    rows: Sequence[DatumRow]
    loss: TinkerLoss
    options: Mapping[str, float]

    def losses(self, logprobs: Tensor, batch: DatumBatch) -> Tensor:
        """Return the loss for each token in a batch, [M], from its targets' log-probabilities, [M]."""
        sizes = list(batch.sizes)
        columns = {key: torch.split(values, sizes) for key, values in batch.inputs.items()}
        rows = enumerate(torch.split(logprobs, sizes))
        return torch.cat(
            [
                self.loss.compute(row, {key: column[place] for key, column in columns.items()}, self.options)
                for place, row in rows
            ]
        )


@dataclass(frozen=True)
class DatumBatch:
    """Rows for one model call, in order of decreasing length.

    Attributes:
        indices: indices of the rows in the pass.
        ids: [B, T] int64, padded on the right.
        sizes: B lengths.
        targets: [M] int64, the rows' targets concatenated; M is the sum of the lengths.
        inputs: inputs of the loss, [M] float32 each.
    """

    indices: Sequence[int]
    ids: Tensor
    sizes: Sequence[int]
    targets: Tensor
    inputs: Mapping[str, Tensor]


def parse_forward_pass(request: wire.ForwardBackwardInput, vocab_size: int, max_length: int) -> ForwardPass:
    """Validate the input of a forward or forward-backward request.

    Raises:
        TinkerRequestError: the loss is unknown, or the data do not fit the loss or the model.
    """
    name, options = request.loss_fn, request.loss_fn_config or {}
    if name == "stable_reinforce":
        raise TinkerRequestError(f"{STABLE_REINFORCE}; use another loss_fn: {', '.join(LOSSES)}")
    if name not in LOSSES:
        raise TinkerRequestError(f"loss_fn {name!r} is unknown; available: {', '.join(LOSSES)}")
    loss = LOSSES[name]
    unknown = sorted(options.keys() - loss.options.keys())
    if unknown:
        raise TinkerRequestError(
            f"loss_fn_config of {name} has {', '.join(map(repr, unknown))}; its options are: "
            f"{', '.join(loss.options) or 'none'}"
        )
    numbers = {key: value for key, value in options.items() if isinstance(value, float)}
    if texts := options.keys() - numbers.keys():
        raise TinkerRequestError(f"loss_fn_config of {name} has a text for {', '.join(sorted(texts))}; send a number")
    if not request.data:
        raise TinkerRequestError("the request has no data; send at least one Datum")
    rows = []
    for index, datum in enumerate(request.data):
        try:
            rows.append(_parse_row(datum, name, loss, vocab_size, max_length))
        except TinkerRequestError as error:
            raise TinkerRequestError(f"datum {index} of {len(request.data)}: {error}") from None
    return ForwardPass(rows, loss, {**loss.options, **numbers})


def _parse_row(datum: wire.Datum, name: str, loss: TinkerLoss, vocab_size: int, max_length: int) -> DatumRow:
    ids = parse_token_ids(datum.model_input.ids, "model_input", vocab_size, max_length)
    required = ("target_tokens", *loss.inputs)
    missing = [key for key in required if key not in datum.loss_fn_inputs]
    unknown = [key for key in datum.loss_fn_inputs if key not in (*required, *loss.optional)]
    if missing or unknown:
        problems = [f"{key} is missing" for key in missing] + [f"{key} is unknown" for key in unknown]
        expected = ", ".join((*required, *(f"{key} (optional)" for key in loss.optional)))
        raise TinkerRequestError(f"{name} takes the inputs {expected}, but {', '.join(problems)}")
    tensors = {key: _parse_tensor(key, tensor, len(ids)) for key, tensor in datum.loss_fn_inputs.items()}
    targets = parse_token_ids(tensors.pop("target_tokens").tolist(), "target_tokens", vocab_size, max_length)
    ones = np.ones(len(ids))
    inputs = {key: tensors.get(key, ones).astype(np.float32) for key in (*loss.inputs, *loss.optional)}
    return DatumRow(ids, targets, inputs)


def parse_token_ids(ids: Sequence[float], field: str, vocab_size: int, max_length: int) -> NDArray[np.int64]:
    """Return token ids as an array.

    Raises:
        TinkerRequestError: the sequence is empty or too long, or an id is not in the vocabulary; `field` is named.
    """
    if not 0 < len(ids) <= max_length:
        raise TinkerRequestError(f"{field} has {len(ids)} tokens; this model takes 1 to {max_length}")
    array = np.asarray(ids, dtype=np.float64)
    if not ((array >= 0) & (array < vocab_size) & (array == np.floor(array))).all():
        raise TinkerRequestError(
            f"{field} has token ids from {array.min():g} to {array.max():g}; the model's are 0 to {vocab_size - 1}; "
            "use the model's own tokenizer"
        )
    return array.astype(np.int64)


def _parse_tensor(key: str, tensor: wire.TensorData, length: int) -> NDArray[np.float64]:
    if tensor.sparse_crow_indices is not None or len(tensor.shape or [length]) != 1:
        raise TinkerRequestError(
            f"{key} has shape {tensor.shape}; this server takes dense tensors with one number per token"
        )
    if len(tensor.data) != length:
        raise TinkerRequestError(
            f"{key} has {len(tensor.data)} numbers, but model_input has {length} tokens; send one number per token"
        )
    values = np.asarray(tensor.data, dtype=np.float64)
    if not np.isfinite(values).all():
        raise TinkerRequestError(f"{key} has numbers that are not finite")
    return values


def batches(forward_pass: ForwardPass, vocab_size: int, device: torch.device) -> Iterator[DatumBatch]:
    """Split a pass's rows into batches with similar lengths and bounded memory."""
    budget = batch_tokens(vocab_size)
    order = sorted(range(len(forward_pass.rows)), key=lambda index: -len(forward_pass.rows[index].ids))
    while order:
        size = max(1, budget // len(forward_pass.rows[order[0]].ids))
        indices, order = order[:size], order[size:]
        rows = [forward_pass.rows[index] for index in indices]
        padded = np.zeros((len(rows), len(rows[0].ids)), dtype=np.int64)
        for line, row in zip(padded, rows, strict=True):
            line[: len(row.ids)] = row.ids
        yield DatumBatch(
            indices,
            torch.from_numpy(padded).to(device),
            [len(row.ids) for row in rows],
            torch.from_numpy(np.concatenate([row.targets for row in rows])).to(device),
            {
                key: torch.from_numpy(np.concatenate([row.inputs[key] for row in rows])).to(device)
                for key in rows[0].inputs
            },
        )
