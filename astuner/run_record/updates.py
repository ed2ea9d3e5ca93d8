"""What an update did with the samples of an episode: beside them in the episode's file, see `episode_file`.

    "updates": [{"advantages": [[812, 0.5], [40, -1.0]], "logprobs": "AACAvw…"}]

has one entry a sample. `advantages` are stretches of trained tokens and their advantage, `logprobs` little-endian
float32 in base64: a fifth of what the numbers take as text, and a thousandth of the time to write.
"""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, TypeVar

from astuner.errors import RecordError
from astuner.schema import CallSpan, Sample

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class SampleUpdate:
    """How an update trained one sample, whose tokens with a `loss_mask` other than 0 are M in number.

    Attributes:
        advantages: (tokens, advantage) of stretches of those M, in order; the counts sum to M.
        logprobs: M natural-log probabilities, float32: the trainer's, as computed for the update that trained them,
            before it moved the weights. None where none were, as an update may skip what has no advantage.
    """

    advantages: tuple[tuple[int, float], ...]
    logprobs: tuple[float, ...] | None = None


def encode_update(update: SampleUpdate) -> dict[str, Any]:
    """Return an update as JSON values.

    An advantage that is not finite makes `dump_json` refuse, as other numbers do.
    """
    logprobs = None if update.logprobs is None else base64.b64encode(_swapped(array("f", update.logprobs)).tobytes())
    return {
        "advantages": [list(run) for run in update.advantages],
        "logprobs": None if logprobs is None else logprobs.decode("ascii"),
    }


def decode_update(row: Mapping[str, Any], sample: Sample) -> SampleUpdate:
    """Return the update of `sample` that `encode_update` made `row` of.

    Raises:
        RecordError: `row` is of no such update.
    """
    try:
        advantages = tuple((int(tokens), float(advantage)) for tokens, advantage in row["advantages"])
        text = row["logprobs"]
        logprobs = None if text is None else tuple(_swapped(array("f", base64.b64decode(text, validate=True))))
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"no update of a sample: {error!r}") from error
    trained = trained_tokens(sample)
    if sum(tokens for tokens, _ in advantages) != trained or (logprobs is not None and len(logprobs) != trained):
        raise RecordError(f"an update is of another number of tokens than its sample trains ({trained})")
    return SampleUpdate(advantages, logprobs)


def trained_tokens(sample: Sample) -> int:
    """Return M, how many places of a sample are trained."""
    return len(sample.loss_mask) - sample.loss_mask.count(0)


def by_token(sample: Sample, update: SampleUpdate) -> tuple[list[float | None], list[float | None]]:
    """Return the advantage and the trainer's logprob of each of a sample's N tokens, None where it has none."""
    advantages = chain.from_iterable(repeat(advantage, tokens) for tokens, advantage in update.advantages)
    logprobs: Iterator[float | None] = repeat(None) if update.logprobs is None else iter(update.logprobs)
    return (
        [next(advantages) if mask else None for mask in sample.loss_mask],
        [next(logprobs) if mask else None for mask in sample.loss_mask],
    )


def call_advantages(samples: Sequence[Sample], updates: Sequence[SampleUpdate]) -> dict[str, float]:
    """Return by call id the advantage of the call's trained tokens, their mean where they differ.

    Calls without a trained token are left out, and all where `updates` is empty, as of an episode not trained.
    """
    found = {}
    for sample, update in zip(samples, updates, strict=False):
        advantages, _ = by_token(sample, update)
        for span in sample.spans:
            values = [value for value in of_span(advantages, span) if value is not None]
            if values:
                same = values.count(values[0]) == len(values)
                found[span.call_id] = values[0] if same else sum(values) / len(values)
    return found


def of_span(values: Sequence[Value], span: CallSpan) -> Sequence[Value]:
    """Return those of a sample's N values that are of the completion of one call."""
    return values[span.start : span.end] if span.nodes is None else [values[node] for node in span.nodes]


def _swapped(numbers: array[float]) -> array[float]:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
