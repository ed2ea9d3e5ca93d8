"""The JSON file of one episode.

An agent's call repeats the conversation so far, so complete prompts would need space quadratic in the number of
calls. Instead, the `prompt_ids` and `messages` of a call are written as a prefix shared with an earlier call, and the
rest:

    "shared": {"call": 3, "ids": 812, "messages": 5}

The prompt starts with the first 812 ids of call 3's prompt and completion, and the messages with its first 5
messages. A sample that is a path through its calls has their tokens: `"of_call": 3` stands for call 3's prompt and
completion, trained where the completions of its `spans` are. The `position_ids` of other samples are null if
they are 0, 1, 2, …. Long sequences of numbers are columns (see `columns`). `updates` is missing if the episode was not
trained.

A training episode is written before the update. Its advantage is the file's last key, so that the results of the
update can be added without encoding the episode again.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from astuner.errors import RecordError, short_repr
from astuner.run_record.files import dump_json, read_json_document
from astuner.run_record.jsonable import (
    FLOATS,
    INTEGERS,
    Redact,
    decode,
    decode_column,
    encode,
    encode_column,
    packed,
    to_jsonable,
)
from astuner.run_record.updates import SampleUpdate, decode_update, encode_update
from astuner.schema import CallSpan, Episode, LlmCall, Sample, Split, TokenCounts, concatenate, pack_floats, view_of

_FORMAT = 1
_CALL_COLUMNS = {
    "prompt_ids": INTEGERS, "completion_ids": INTEGERS, "logprobs": FLOATS, "sampler_logprobs": FLOATS,
}  # fmt: skip
# Shorter samples are written in full, which is easier to read.
_MIN_DERIVED = 64
# Number of earlier calls that are searched for a shared prefix: enough for agents that take turns, and linear in time.
_SEARCHED_CALLS = 8
# The end of an untrained episode's file. The results of the update take its place. With blanks up to its length, a
# file to which they are written is not JSON until they are complete.
_KEY = b',"advantage":'
_UNTRAINED = _KEY + b"null}"
_TRAINED = _KEY + b"     "
# The beginning of a file without token ids and samples.
_WITHHELD = b'{"format":1,"withheld":'


@dataclass(frozen=True, slots=True)
class EpisodeLabels:
    """Facts about an episode that the episode itself does not hold.

    Attributes:
        step: The training step; 0 is before the first update.
        split: `train` or `val`.
        advantage: The advantage of the whole episode.
        tokens: Token counts; None if the tokens were not counted.
    """

    step: int
    split: Split
    advantage: float | None = None
    tokens: TokenCounts | None = None


@dataclass(frozen=True, slots=True)
class RecordedEpisode:
    """The content of an episode's file.

    Attributes:
        withheld: Why the file has no token ids and samples; None if it has them.
        updates: The training of each sample; empty if unknown or untrained.
    """

    episode: Episode
    labels: EpisodeLabels
    withheld: str | None = None
    updates: tuple[SampleUpdate, ...] = ()


def episode_to_json(
    episode: Episode, labels: EpisodeLabels, redact: Redact, updates: Sequence[SampleUpdate] = ()
) -> bytes:
    """Return the content of an episode's file; `updates` is empty if the episode was not trained.

    Token ids are exact. If `redact` changes a text, token ids and samples are left out, as they spell the secret.
    """
    is_redacted = False

    def redact_and_note(text: str) -> str:
        nonlocal is_redacted
        clean = redact(text)
        is_redacted |= clean != text
        return clean

    row = _encode_episode(episode, redact_and_note)
    notes = {}
    if is_redacted:
        # The excerpts of a fork may be part of a secret, which the redactor cannot recognise.
        calls = [
            replace(
                call, prompt_ids=(), completion_ids=(), logprobs=(), sampler_logprobs=(),
                fork=call.fork and replace(call.fork, expected_ids=(), found_ids=(), expected="", found=""),
            )
            for call in episode.calls
        ]  # fmt: skip
        row = _encode_episode(replace(episode, calls=tuple(calls), samples=()), redact)
        notes = {"withheld": "token ids and samples: they spell what was redacted"}
    values = encode(labels, redact)
    advantage = values.pop("advantage")
    document = {"format": _FORMAT, **notes, **values, "episode": row, "advantage": None}
    try:
        content = orjson.dumps(document)
    except TypeError:  # lone surrogates, or integers of more than 64 bits
        content = dump_json(document)
    if advantage is None and not updates:
        return content
    return content.removesuffix(_UNTRAINED) + _encode_results(advantage, () if is_redacted else updates)


def add_update(path: Path, advantage: float | None, updates: Sequence[SampleUpdate]) -> None:
    """Add the update's results to the file for an episode that it trained.

    They are written in place: file systems write a file that replaces another one to the disk at once, which takes
    tens of milliseconds on a busy disk. If this is interrupted, the file reads as an untrained episode's.

    The file has the content that `episode_to_json` returns for an untrained episode. The training of each sample,
    `updates`, is left out if the file has no samples, as they spell a secret.

    Raises:
        OSError, RecordError: If the file cannot be written, or is not an untrained episode's.
    """
    with path.open("r+b") as file:
        is_withheld = file.read(len(_WITHHELD)) == _WITHHELD
        start = max(file.seek(0, os.SEEK_END) - len(_UNTRAINED), 0)
        file.seek(start)
        if file.read() != _UNTRAINED:
            raise RecordError(f"{path} was changed after the run wrote it")
        file.seek(start)
        file.write(_encode_results(advantage, () if is_withheld else updates))


def _encode_results(advantage: float | None, updates: Sequence[SampleUpdate]) -> bytes:
    """Return the bytes that end a trained episode's file, in place of `_UNTRAINED`."""
    results: dict[str, Any] = {"advantage": advantage}
    if updates:
        results["updates"] = [encode_update(update) for update in updates]
    try:
        added = dump_json(results)
    except (TypeError, ValueError):
        added = dump_json(to_jsonable(results, str))
    return _TRAINED + added.removeprefix(b'{"advantage":')


def read_episode_document(path: Path) -> dict[str, Any]:
    """Return the JSON object of an episode's file.

    If `add_update` writes to the file at the same time, or was interrupted, it is the object of an untrained episode.

    Raises:
        RecordError: If the file cannot be read or is not an episode's.
    """

    def without_results(content: bytes) -> object:
        """Return the JSON object without the update's results, which are incomplete; None if there is no object."""
        complete, key, _ = content.rpartition(_KEY)
        try:
            return json.loads(complete + _UNTRAINED) if key else None
        except (ValueError, RecursionError):
            return None

    return read_json_document(path, "an episode of a run record", _FORMAT, without_results)


def read_episode(path: Path) -> Episode:
    """Return the episode that a run recorded in `path`.

    It equals the original except for redacted texts and for values that JSON cannot represent.

    Raises:
        RecordError: If the file cannot be read or holds no episode.
    """
    return read_recorded_episode(path).episode


def read_recorded_episode(path: Path) -> RecordedEpisode:
    """Return the content of the episode's file `path`; errors as for `read_episode`."""
    document = read_episode_document(path)
    try:
        row = document["episode"]
        unfold_calls(row["calls"])
        _decode_samples(row["samples"], [decode(LlmCall, call) for call in row["calls"]])
        episode, labels = decode(Episode, row), decode(EpisodeLabels, document)
        for sample in episode.samples:
            length = len(sample.token_ids)
            if any(not 0 <= node < length for span in sample.spans for node in span.nodes or ()):
                raise RecordError(f"a sample with {length} tokens has a call outside them")
        updates = tuple(map(decode_update, document.get("updates", ()), episode.samples))
        return RecordedEpisode(episode, labels, document.get("withheld"), updates)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise RecordError(f"{path} holds an incomplete episode: {short_repr(error)}") from error
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from error


def _encode_episode(episode: Episode, redact: Redact) -> dict[str, Any]:
    row = encode(replace(episode, calls=(), samples=()), redact)
    row["calls"] = _encode_calls(episode.calls, redact)
    row["samples"] = [_encode_sample(sample, episode.calls, redact) for sample in episode.samples]
    return row


def _encode_calls(calls: Sequence[LlmCall], redact: Redact) -> list[dict[str, Any]]:
    """Return calls as JSON values, with references to the prefixes that they share with earlier calls."""
    rows: list[dict[str, Any]] = []
    streams: list[NDArray[Any]] = []
    all_messages: list[list[object]] = []
    for call in calls:
        stream = np.asarray(concatenate(call.prompt_ids, call.completion_ids))
        prompt = stream[: len(call.prompt_ids)]
        best, longest = None, 0
        for index in range(len(streams) - 1, max(-1, len(streams) - 1 - _SEARCHED_CALLS), -1):
            size = min(len(prompt), len(streams[index]))
            differs = prompt[:size] != streams[index][:size]
            length = int(differs.argmax()) if differs.any() else size
            if length > longest:
                best, longest = index, length
                if length == len(streams[index]):
                    break
        if len(streams) > _SEARCHED_CALLS:
            streams[-_SEARCHED_CALLS - 1] = np.empty(0)  # is not searched any more
        streams.append(stream)
        earlier = ((), []) if best is None else (calls[best].messages, all_messages[best])
        messages, equal = _encode_messages(call.messages, *earlier, redact)
        all_messages.append(messages)
        without = replace(call, prompt_ids=(), completion_ids=(), logprobs=(), sampler_logprobs=(), messages=())
        row = encode(without, redact)
        row["shared"] = None if best is None else {"call": best, "ids": longest, "messages": equal}
        row["prompt_ids"] = encode_column(prompt[longest:])
        row["completion_ids"] = encode_column(call.completion_ids)
        row["logprobs"] = encode_column(call.logprobs)
        row["sampler_logprobs"] = encode_column(call.sampler_logprobs)
        row["messages"] = messages[equal:]
        rows.append(row)
    return rows


def _encode_messages(
    messages: Sequence[object], earlier: Sequence[object], earlier_values: Sequence[object], redact: Redact
) -> tuple[list[object], int]:
    """Return messages as JSON values, and how many messages at the beginning equal those of an earlier call."""
    values: list[object] = []
    equal, is_prefix = 0, True
    for index, message in enumerate(messages):
        known = index < len(earlier)
        if known and message is earlier[index]:
            value = earlier_values[index]
        else:
            value = to_jsonable(message, redact)
            # 1, 1.0 and True are equal in Python, but not in JSON.
            known = known and value == earlier_values[index] and repr(value) == repr(earlier_values[index])
        values.append(value)
        is_prefix = is_prefix and known
        equal += is_prefix
    return values, equal


def unfold_calls(rows: Sequence[dict[str, Any]]) -> None:
    """Replace columns by numbers, and references to earlier calls by the prefixes that they stand for, in place."""
    for row in rows:
        for name, type_codes in _CALL_COLUMNS.items():
            if name in row:
                row[name] = decode_column(row[name], type_codes)
        shared = row.pop("shared")
        if shared is not None:
            base = rows[shared["call"]]
            stream, number = concatenate(base["prompt_ids"], base["completion_ids"]), shared["ids"]
            row["prompt_ids"] = concatenate(view_of(stream, 0, number), row["prompt_ids"])
            row["messages"] = [*base["messages"][: shared["messages"]], *row["messages"]]


def _encode_sample(sample: Sample, calls: Sequence[LlmCall], redact: Redact) -> dict[str, Any]:
    """Return a sample as JSON values. If its calls determine its numbers, these are left out."""
    empty = replace(sample, token_ids=(), train_counts=(), logprobs=(), position_ids=(), parents=None)
    row = encode(empty, redact)
    row["parents"] = None if sample.parents is None else encode_column(sample.parents)
    is_plain = sample.parents is None and len(sample.token_ids) >= _MIN_DERIVED
    if is_plain and (number := _call_of(sample, calls)) is not None:
        return row | {"of_call": number, **dict.fromkeys(("token_ids", "loss_mask", "logprobs", "position_ids"))}
    row["token_ids"] = encode_column(sample.token_ids)
    row["loss_mask"] = encode_column(sample.train_counts)
    row["logprobs"] = encode_column(sample.logprobs)
    is_row = np.array_equal(np.asarray(sample.position_ids), np.arange(len(sample.token_ids)))
    row["position_ids"] = None if is_row else encode_column(sample.position_ids)
    return row


def _call_of(sample: Sample, calls: Sequence[LlmCall]) -> int | None:
    """Return the index of the call whose tokens are the sample's, if its calls determine all its numbers."""
    by_id = {call.call_id: index for index, call in enumerate(calls)}
    numbers = [by_id.get(span.call_id) for span in sample.spans]
    longest = max(zip((span.end for span in sample.spans), numbers, strict=True), default=(0, None))[1]
    if longest is None or None in numbers:
        return None
    try:
        derived = _derived_numbers(sample.spans, longest, calls)
    except (ValueError, IndexError):  # the spans are not those of the calls
        return None
    recorded = (sample.token_ids, sample.train_counts, sample.logprobs, sample.position_ids)
    is_equal = all(np.array_equal(np.asarray(left), right) for left, right in zip(recorded, derived, strict=True))
    return longest if is_equal else None


def _derived_numbers(
    spans: Sequence[CallSpan], number: int, calls: Sequence[LlmCall]
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return token ids, train counts, logprobs and position ids, [N] each, of the row that ends with a call."""
    ids = np.asarray(concatenate(calls[number].prompt_ids, calls[number].completion_ids))
    counts, logprobs = np.zeros(len(ids), np.int32), np.zeros(len(ids))
    by_id = {call.call_id: call for call in calls}
    for span in spans:
        counts[span.start : span.end] += 1
        logprobs[span.start : span.end] = by_id[span.call_id].logprobs
    return ids, counts, logprobs, np.arange(len(ids))


def _decode_samples(rows: Sequence[dict[str, Any]], calls: Sequence[LlmCall]) -> None:
    """Replace columns by numbers, and add the numbers that were left out, in place."""
    for row in rows:
        if (number := row.pop("of_call", None)) is not None:
            _, counts, logprobs, positions = _derived_numbers(
                [decode(CallSpan, span) for span in row["spans"]], number, calls
            )
            row["token_ids"] = concatenate(calls[number].prompt_ids, calls[number].completion_ids)
            row["loss_mask"] = packed(array("i", counts.tolist()))
            row["logprobs"] = pack_floats(logprobs.tolist())
            row["position_ids"] = range(len(positions))
            continue
        for name in ("token_ids", "loss_mask", "logprobs", "position_ids", "parents"):
            if isinstance(row.get(name), dict):
                row[name] = decode_column(row[name], FLOATS if name == "logprobs" else INTEGERS)
        if row["position_ids"] is None:
            row["position_ids"] = range(len(row["token_ids"]))


def common_prefix_len(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Return how many items, such as ids or messages, are equal at the start of two sequences."""
    # A binary search over slices, which are compared in C, is faster than a loop over the ids. O(n): slices halve, too.
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
