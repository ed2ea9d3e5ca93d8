"""The training of an episode's samples in an update, recorded in the episode's file (see `episode_file`).

    "updates": [{"advantages": [[812, 0.5], [40, -1.0]], "logprobs": "AACAvw…", "entropies": "AACAPw…"}]

has one entry per sample. `advantages` holds runs of trained tokens with equal advantage as [count, advantage].
`logprobs` and `entropies` hold little-endian float32 numbers in base64: a fifth of decimal text's size, and a
thousandth of its time to write. Records of older versions have no `entropies`.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, TypeVar

import numpy as np

from astuner.errors import RecordError, short_repr
from astuner.schema import CallSpan, Floats, Sample

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class SampleUpdate:
    """The training of one sample in an update. M is the number of the sample's tokens with a nonzero `train_counts`.

    Attributes:
        advantages: (count, advantage) of consecutive runs in the M tokens; the counts sum to M.
        logprobs: [M] float32, natural-log probabilities computed by the trainer before this update changed the weights.
            None if the update did not compute them, as it may skip samples without advantage.
        entropies: [M] float32, entropies in nats of the trainer's distributions from which the tokens were sampled,
            computed with `logprobs`. None if the update did not compute them.
    """

    advantages: tuple[tuple[int, float], ...]
    logprobs: Floats | None = None
    entropies: Floats | None = None


def encode_update(update: SampleUpdate) -> dict[str, Any]:
    """Return an update as JSON values. An advantage that is not finite makes `dump_json` raise."""
    return {
        "advantages": [list(run) for run in update.advantages],
        "logprobs": _encode_numbers(update.logprobs),
        "entropies": _encode_numbers(update.entropies),
    }


def _encode_numbers(numbers: Floats | None) -> str | None:
    return None if numbers is None else base64.b64encode(np.asarray(numbers, "<f4").tobytes()).decode("ascii")


def _decode_numbers(text: str | None) -> tuple[float, ...] | None:
    return None if text is None else tuple(np.frombuffer(base64.b64decode(text, validate=True), "<f4").tolist())


def decode_update(row: Mapping[str, Any], sample: Sample) -> SampleUpdate:
    """Return the update of `sample` from which `encode_update` made `row`.

    Raises:
        RecordError: If `row` is not an update of this sample.
    """
    try:
        advantages = tuple((int(count), float(advantage)) for count, advantage in row["advantages"])
        logprobs, entropies = _decode_numbers(row["logprobs"]), _decode_numbers(row.get("entropies"))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise RecordError(f"invalid update of a sample: {short_repr(error)}") from error
    trained = count_trained_tokens(sample)
    if any(count < 0 for count, _ in advantages):
        raise RecordError("an update has a negative number of tokens for an advantage; expected at least 0")
    lengths = [len(numbers) for numbers in (logprobs, entropies) if numbers is not None]
    if {sum(count for count, _ in advantages), *lengths} != {trained}:
        raise RecordError(f"an update does not have one value per trained token of its sample ({trained})")
    return SampleUpdate(advantages, logprobs, entropies)


def count_trained_tokens(sample: Sample) -> int:
    """Return M, the number of trained tokens in a sample."""
    return len(sample.train_counts) - sample.train_counts.count(0)


def by_token(sample: Sample, update: SampleUpdate) -> tuple[list[float | None], list[float | None]]:
    """Return the advantages and the trainer's logprobs of a sample's tokens, [N] each; None for untrained tokens."""
    advantages = chain.from_iterable(repeat(advantage, count) for count, advantage in update.advantages)
    return _at_trained_tokens(sample, advantages), _at_trained_tokens(sample, update.logprobs)


def entropy_by_token(sample: Sample, update: SampleUpdate) -> list[float | None]:
    """Return the entropies of the trainer's distributions at a sample's tokens, [N] in nats; None for untrained tokens.

    All are None if the update did not compute them.
    """
    return _at_trained_tokens(sample, update.entropies)


def _at_trained_tokens(sample: Sample, values: Iterable[float] | None) -> list[float | None]:
    left: Iterator[float | None] = repeat(None) if values is None else iter(values)
    return [next(left) if count else None for count in sample.train_counts]


def call_advantages(samples: Sequence[Sample], updates: Sequence[SampleUpdate]) -> dict[str, float]:
    """Return the mean advantage of each call's trained tokens by call id.

    Calls without trained tokens are left out. The result is empty if `updates` is, as for an untrained episode.
    """
    means = {}
    for sample, update in zip(samples, updates, strict=False):
        advantages, _ = by_token(sample, update)
        for span in sample.spans:
            values = [value for value in span_values(advantages, span) if value is not None]
            if values:
                # Equal values are not averaged, to keep them exact.
                means[span.call_id] = values[0] if len(set(values)) == 1 else sum(values) / len(values)
    return means


def span_values(values: Sequence[Value], span: CallSpan) -> Sequence[Value]:
    """Return the part of a sample's N per-token values that belongs to one call's completion."""
    return values[span.start : span.end] if span.nodes is None else [values[node] for node in span.nodes]
