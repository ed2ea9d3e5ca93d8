"""Scores a prompt's tokens, and other tokens in their place, if a sampling request asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from astuner.tinker_server import wire
from astuner.tinker_server.wire import TinkerRequestError

_MAX_TARGETS = 1024
"""Maximum number of target tokens per position."""


def check_scores(request: wire.SampleRequest, length: int, vocab_size: int) -> None:
    """Check the request for scores on a prompt with `length` tokens.

    Raises:
        TinkerRequestError: a field does not fit the prompt, another field or the vocabulary.
    """
    last = request.prompt_logprobs_last_n
    if last is not None and not request.prompt_logprobs:
        raise TinkerRequestError("prompt_logprobs_last_n applies to prompt logprobs; set prompt_logprobs")
    if last is not None and last >= length:
        raise TinkerRequestError(
            f"prompt_logprobs_last_n is {last}, but the prompt has {length} tokens; send 1 to {length - 1}, or leave "
            "it out to score the whole prompt"
        )
    if request.target_prompt_logprobs is not None:
        _check_targets(request.target_prompt_logprobs, length, vocab_size)


def _check_targets(targets: wire.TensorData, length: int, vocab_size: int) -> None:
    shape = targets.shape or []
    if targets.dtype != "int64" or len(shape) != 2 or shape[0] != length - 1 or not 0 < shape[1] <= _MAX_TARGETS:
        raise TinkerRequestError(
            f"target_prompt_logprobs is {targets.dtype} {shape}; expected int64 [{length - 1}, K], a row for each "
            f"token of the prompt except the first, with K from 1 to {_MAX_TARGETS}"
        )
    rows, columns = targets.sparse_crow_indices, targets.sparse_col_indices
    if rows is None:
        size = shape[0] * shape[1]
    else:
        size = len(targets.data)
        bounds = np.asarray(rows)
        if len(rows) != length or rows[0] != 0 or rows[-1] != size or (np.diff(bounds) < 0).any():
            raise TinkerRequestError(
                f"target_prompt_logprobs has {len(rows)} sparse_crow_indices; expected {length} that rise from 0 to "
                f"the number of values, {size}"
            )
        if columns is None or len(columns) != size:
            raise TinkerRequestError("target_prompt_logprobs needs one of sparse_col_indices for each value")
    if len(targets.data) != size:
        raise TinkerRequestError(f"target_prompt_logprobs has {len(targets.data)} values; its shape needs {size}")
    ids = np.asarray(targets.data, dtype=np.float64)
    if not ((ids >= -1) & (ids < vocab_size) & (ids == np.floor(ids))).all():
        raise TinkerRequestError(
            f"target_prompt_logprobs has values from {ids.min():g} to {ids.max():g}; expected token ids from 0 to "
            f"{vocab_size - 1}, or -1 for none"
        )


def score_prompt(logits: Tensor, ids: Sequence[int], request: wire.SampleRequest, temperature: float) -> dict[str, Any]:
    """Return the scores that a request asks for, as fields of Tinker's SampleResponse.

    Args:
        logits: the logits of each prompt token except the first, [N - 1, V].
        ids: the prompt, N token ids.
        request: the request.
        temperature: divides the logits of all log-probabilities.
    """
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    first_scored = len(ids) - (request.prompt_logprobs_last_n or len(ids) - 1)
    none = [None] * first_scored
    scores: dict[str, Any] = {}
    if request.prompt_logprobs:
        sampled = logprobs.gather(1, torch.tensor(ids[1:], device=logits.device)[:, None])[:, 0].tolist()
        scores["prompt_logprobs"] = [*none, *sampled[first_scored - 1 :]]
    if request.topk_prompt_logprobs:
        best = logprobs[first_scored - 1 :].topk(min(request.topk_prompt_logprobs, logits.shape[-1]))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        scores["topk_prompt_logprobs"] = [*none, *(list(zip(*pair, strict=True)) for pair in pairs)]
    if request.target_prompt_logprobs is not None:
        scores["target_prompt_logprobs"] = _score_targets(logprobs, request.target_prompt_logprobs)
    if request.prompt_alt_tokens_k:
        # Draw tokens with replacement from the distribution at each position, at the request's sampling temperature.
        params, count = request.sampling_params, request.prompt_alt_tokens_k
        if params.temperature == 0 or not len(logits):
            drawn = logits.argmax(dim=-1, keepdim=True).expand(-1, count)
        else:
            generator = torch.Generator(logits.device)
            if params.seed is None:
                generator.seed()
            else:
                generator.manual_seed(params.seed % 2**63)
            probabilities = torch.softmax(logits.float() / params.temperature, dim=-1)
            drawn = torch.multinomial(probabilities, count, replacement=True, generator=generator)
        shape = list(drawn.shape)
        scores["prompt_alt_tokens"] = {
            "tokens": {"data": drawn.flatten().tolist(), "dtype": "int64", "shape": shape},
            "logprobs": {"data": logprobs.gather(1, drawn).flatten().tolist(), "dtype": "float32", "shape": shape},
        }
    return scores


def _score_targets(logprobs: Tensor, targets: wire.TensorData) -> dict[str, Any]:
    assert targets.shape is not None  # checked by `check_scores`
    bounds = targets.sparse_crow_indices
    counts = [targets.shape[1]] * targets.shape[0] if bounds is None else np.diff(np.asarray(bounds)).tolist()
    rows = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).to(logprobs.device)
    ids = torch.tensor(targets.data, dtype=torch.int64, device=logprobs.device)
    values = torch.where(ids < 0, 0.0, logprobs[rows, ids.clamp(min=0)])
    return {
        "data": values.tolist(),
        "dtype": "float32",
        "shape": targets.shape,
        "sparse_crow_indices": bounds,
        "sparse_col_indices": targets.sparse_col_indices,
    }
