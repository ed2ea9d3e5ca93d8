"""One episode as one JSON file.

Every call of an agent repeats the conversation so far, so that writing prompts in full would cost space quadratic in
the number of calls. A call's `prompt_ids` and `messages` are therefore written as what they share with an earlier call
of the file, and the rest:

    "shared": {"call": 3, "ids": 812, "messages": 5}

means that the prompt begins with the first 812 ids of call 3's prompt + completion, and its messages with the first 5
of call 3's. A sample's `position_ids` are null where they are 0, 1, 2, …, and `updates` is left out where the episode
was not trained.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from astuner.errors import RecordError
from astuner.run_record.codec import decode, encode
from astuner.run_record.files import dump_json
from astuner.run_record.plain import Redact, to_plain
from astuner.run_record.updates import SampleUpdate, decode_update, encode_update
from astuner.schema import Episode, Fork, TokenCounts

Split = Literal["train", "val"]

_FORMAT = 1
# How many earlier calls are looked at for a shared beginning: enough for agents that take turns, and linear.
_LOOK_BACK = 8


@dataclass(frozen=True, slots=True)
class EpisodeLabels:
    """What the run knows of an episode beside the episode itself.

    Attributes:
        step: the training step; 0 is before the first update.
        split: `train` or `val`.
        advantage: what the trainer gave it, else None.
        tokens: its tokens, None where they were not counted.
    """

    step: int
    split: Split
    advantage: float | None = None
    tokens: TokenCounts | None = None


@dataclass(frozen=True, slots=True)
class RecordedEpisode:
    """An episode's file.

    Attributes:
        episode: the episode.
        labels: what the run knew of it.
        withheld: why token ids and samples are not there; None where they are.
        updates: how each of the episode's samples was trained; empty where that is not known.
    """

    episode: Episode
    labels: EpisodeLabels
    withheld: str | None = None
    updates: tuple[SampleUpdate, ...] = ()


@dataclass(frozen=True, slots=True)
class _Stream:
    """What a later call can share with this one."""

    ids: tuple[int, ...]
    messages: Sequence[object]


def episode_to_json(
    episode: Episode, labels: EpisodeLabels, redact: Redact, updates: Sequence[SampleUpdate] = ()
) -> bytes:
    """Return the content of an episode's file, every text redacted.

    Token ids are exact. Where a text had to be redacted they are left out, with a note, as they spell it too.
    """
    redacted = False

    def watched(text: str) -> str:
        nonlocal redacted
        clean = redact(text)
        redacted |= clean != text
        return clean

    row = encode(episode, watched)
    notes = {}
    if redacted:
        episode = _without_ids(episode)
        row, notes = encode(episode, redact), {"withheld": "token ids and samples: they spell what was redacted"}
    row["calls"] = _fold_calls(episode, row["calls"])
    for sample in row["samples"]:
        if tuple(sample["position_ids"]) == tuple(range(len(sample["token_ids"]))):
            sample["position_ids"] = None
    document = {"format": _FORMAT, **notes, **encode(labels, redact), "episode": row}
    if updates and episode.samples:
        document["updates"] = [encode_update(update) for update in updates]
    try:
        return dump_json(document)
    except (TypeError, ValueError):
        # A tuple of numbers holds NaN, or numbers that are not Python's.
        return dump_json(to_plain(document, redact))


def read_episode(path: Path) -> Episode:
    """Return the episode that a run recorded in `path`.

    It equals the one that was written, save for what was redacted and for values that JSON has not.

    Raises:
        RecordError: the file cannot be read, or holds no episode.
    """
    return read_recorded_episode(path).episode


def read_recorded_episode(path: Path) -> RecordedEpisode:
    """Return all that the episode's file `path` holds; see `read_episode`.

    Raises:
        RecordError: the file cannot be read, or holds no episode.
    """
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise RecordError(f"cannot read the episode {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise RecordError(f"{path} is no JSON file: {error}") from error
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise RecordError(f"{path} is no episode of a run record of format {_FORMAT}")
    try:
        row = document["episode"]
        _unfold_calls(row["calls"])
        for sample in row["samples"]:
            if sample["position_ids"] is None:
                sample["position_ids"] = range(len(sample["token_ids"]))
        episode, labels = decode(Episode, row), decode(EpisodeLabels, document)
        updates = tuple(map(decode_update, document.get("updates", ()), episode.samples))
        return RecordedEpisode(episode, labels, document.get("withheld"), updates)
    except (KeyError, IndexError, TypeError) as error:
        raise RecordError(f"{path} holds no whole episode: {error!r}") from error
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from error


def _without_ids(episode: Episode) -> Episode:
    calls = [
        replace(call, prompt_ids=(), completion_ids=(), logprobs=(), fork=call.fork and _without_excerpts(call.fork))
        for call in episode.calls
    ]
    return replace(episode, calls=tuple(calls), samples=())


def _without_excerpts(fork: Fork) -> Fork:
    """Leave out the few tokens that a fork shows: they may be a piece of a secret, which nothing would recognise."""
    return replace(fork, expected_ids=(), found_ids=(), expected="", found="")


def _fold_calls(episode: Episode, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    streams: list[_Stream] = []
    folded = []
    for call, row in zip(episode.calls, rows, strict=True):
        base, shared = _best_base(call.prompt_ids, streams)
        messages = _shared_items(row["messages"], streams[base].messages) if base is not None else 0
        streams.append(_Stream(call.prompt_ids + call.completion_ids, row["messages"]))
        rest = {"prompt_ids": call.prompt_ids[shared:], "messages": row["messages"][messages:]}
        origin = None if base is None else {"call": base, "ids": shared, "messages": messages}
        folded.append({**row, "shared": origin, **rest})
    return folded


def _unfold_calls(rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        shared = row.pop("shared")
        if shared is not None:
            base = rows[shared["call"]]
            stream = [*base["prompt_ids"], *base["completion_ids"]]
            row["prompt_ids"] = [*stream[: shared["ids"]], *row["prompt_ids"]]
            row["messages"] = [*base["messages"][: shared["messages"]], *row["messages"]]


def _best_base(prompt: tuple[int, ...], streams: Sequence[_Stream]) -> tuple[int | None, int]:
    """Return which of the latest calls shares the longest beginning with `prompt`, and how many ids that is."""
    best: int | None = None
    longest = 0
    for index in range(len(streams) - 1, max(-1, len(streams) - 1 - _LOOK_BACK), -1):
        shared = shared_ids(prompt, streams[index].ids)
        if shared > longest:
            best, longest = index, shared
            if shared == len(streams[index].ids):
                break
    return best, longest


def shared_ids(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """Return with how many ids two sequences begin alike."""
    # Slices compare in C, so halving beats a loop over the ids: O(n) in all, as the slices halve too.
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _shared_items(left: Sequence[object], right: Sequence[object]) -> int:
    count = 0
    for one, other in zip(left, right, strict=False):
        # 1, 1.0 and True are equal in Python, but not in JSON.
        if one != other or repr(one) != repr(other):
            break
        count += 1
    return count
