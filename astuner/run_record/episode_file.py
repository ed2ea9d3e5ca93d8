"""The JSON file of one episode.

Each call of an agent repeats the conversation so far, so complete prompts would need space quadratic in the number of
calls. Instead, the `prompt_ids` and `messages` of a call are written as a prefix shared with an earlier call, and the
rest:

    "shared": {"call": 3, "ids": 812, "messages": 5}

The prompt starts with the first 812 ids of the prompt and completion of call 3, and the messages with its first 5
messages. The `position_ids` of a sample are null if they are 0, 1, 2, …. `updates` is missing if the episode was not
trained.

A training episode is written before the update. Its advantage is the last key of the file, so that the results of the
update can be added without encoding the episode again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from astuner.errors import RecordError, short_repr
from astuner.run_record.files import dump_json, read_json_document
from astuner.run_record.jsonable import Redact, decode, encode, to_jsonable
from astuner.run_record.updates import SampleUpdate, decode_update, encode_update
from astuner.schema import Episode, Split, TokenCounts

EPISODE_FORMAT = 1
"""The format of the files."""
# Number of earlier calls that are searched for a shared prefix: enough for agents that take turns, and linear in time.
_SEARCHED_CALLS = 8
# The end of the file of an untrained episode, and the beginning of a file without token ids and samples.
_UNTRAINED = b',"advantage":null}'
_WITHHELD = b'{"format":1,"withheld":'


@dataclass(frozen=True, slots=True)
class EpisodeLabels:
    """Facts about an episode that the episode itself does not hold.

    Attributes:
        step: The training step; 0 is before the first update.
        split: `train` or `val`.
        advantage: The advantage of the whole episode, or None.
        tokens: Token counts, or None if the tokens were not counted.
    """

    step: int
    split: Split
    advantage: float | None = None
    tokens: TokenCounts | None = None


@dataclass(frozen=True, slots=True)
class RecordedEpisode:
    """The content of an episode's file.

    Attributes:
        episode: The episode.
        labels: Its step, split, advantage and token counts.
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
    """Return the content of an episode's file.

    Token ids are exact. If a text had to be redacted, token ids and samples are left out, as they spell the secret.

    Args:
        episode: The episode.
        labels: Its step, split, advantage and token counts.
        redact: Applied to every text.
        updates: The training of each sample; empty if the episode was not trained.
    """
    is_redacted = False

    def redact_and_note(text: str) -> str:
        nonlocal is_redacted
        clean = redact(text)
        is_redacted |= clean != text
        return clean

    row = encode(episode, redact_and_note)
    notes = {}
    if is_redacted:
        episode = _without_ids(episode)
        row, notes = encode(episode, redact), {"withheld": "token ids and samples: they spell what was redacted"}
    _fold_calls(episode, row["calls"])
    for sample in row["samples"]:
        if tuple(sample["position_ids"]) == tuple(range(len(sample["token_ids"]))):
            sample["position_ids"] = None
    values = encode(labels, redact)
    advantage = values.pop("advantage")
    document = {"format": EPISODE_FORMAT, **notes, **values, "episode": row, "advantage": None}
    try:
        content = dump_json(document)
    except (TypeError, ValueError):
        # A tuple of numbers holds NaN, or numbers of another type than Python's.
        content = dump_json(to_jsonable(document, redact))
    return content if advantage is None and not updates else with_update(content, advantage, updates)


def with_update(content: bytes, advantage: float | None, updates: Sequence[SampleUpdate]) -> bytes:
    """Return the content of an episode's file with the results of the update that trained it.

    Args:
        content: The content without them, as `episode_to_json` returns it for an untrained episode.
        advantage: The advantage of the whole episode.
        updates: The training of each sample. It is left out if the file has no samples, as they spell a secret.

    Raises:
        RecordError: If the content is not that of an untrained episode.
    """
    if not content.endswith(_UNTRAINED):
        raise RecordError("the file was changed after the run wrote it")
    results: dict[str, Any] = {"advantage": advantage}
    if updates and not content.startswith(_WITHHELD):
        results["updates"] = [encode_update(update) for update in updates]
    try:
        added = dump_json(results)
    except (TypeError, ValueError):
        added = dump_json(to_jsonable(results, str))
    return content.removesuffix(_UNTRAINED) + b"," + added[1:]


def read_episode(path: Path) -> Episode:
    """Return the episode that a run recorded in `path`.

    It equals the original except for redacted texts and for values that JSON cannot represent.

    Raises:
        RecordError: If the file cannot be read or holds no episode.
    """
    return read_recorded_episode(path).episode


def read_recorded_episode(path: Path) -> RecordedEpisode:
    """Return the content of the episode's file `path`; see `read_episode`.

    Raises:
        RecordError: If the file cannot be read or holds no episode.
    """
    document = read_json_document(path, "an episode of a run record", EPISODE_FORMAT)
    try:
        row = document["episode"]
        unfold_calls(row["calls"])
        for sample in row["samples"]:
            if sample["position_ids"] is None:
                sample["position_ids"] = range(len(sample["token_ids"]))
        episode, labels = decode(Episode, row), decode(EpisodeLabels, document)
        for sample in episode.samples:
            length = len(sample.token_ids)
            if any(not 0 <= node < length for span in sample.spans for node in span.nodes or ()):
                raise RecordError(f"a sample of {length} tokens has a call outside of its tokens")
        updates = tuple(map(decode_update, document.get("updates", ()), episode.samples))
        return RecordedEpisode(episode, labels, document.get("withheld"), updates)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise RecordError(f"{path} holds an incomplete episode: {short_repr(error)}") from error
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from error


def _without_ids(episode: Episode) -> Episode:
    calls = []
    for call in episode.calls:
        # The excerpts of a fork may be part of a secret, which the redactor cannot recognise.
        fork = call.fork and replace(call.fork, expected_ids=(), found_ids=(), expected="", found="")
        calls.append(replace(call, prompt_ids=(), completion_ids=(), logprobs=(), sampler_logprobs=(), fork=fork))
    return replace(episode, calls=tuple(calls), samples=())


def _fold_calls(episode: Episode, rows: Sequence[dict[str, Any]]) -> None:
    """Replace the prefixes that calls share with earlier calls by references, in place."""
    streams: list[tuple[int, ...]] = []
    messages: list[Sequence[object]] = []
    for call, row in zip(episode.calls, rows, strict=True):
        best, longest = None, 0
        for index in range(len(streams) - 1, max(-1, len(streams) - 1 - _SEARCHED_CALLS), -1):
            length = common_prefix_len(call.prompt_ids, streams[index])
            if length > longest:
                best, longest = index, length
                if length == len(streams[index]):
                    break
        streams.append(call.prompt_ids + call.completion_ids)
        messages.append(row["messages"])
        row["shared"] = None
        if best is not None:
            equal = 0
            for left, right in zip(row["messages"], messages[best], strict=False):
                # 1, 1.0 and True are equal in Python, but not in JSON.
                if left != right or repr(left) != repr(right):
                    break
                equal += 1
            row["shared"] = {"call": best, "ids": longest, "messages": equal}
            row["prompt_ids"] = call.prompt_ids[longest:]
            row["messages"] = row["messages"][equal:]


def unfold_calls(rows: Sequence[dict[str, Any]]) -> None:
    """Replace the references to earlier calls by the prefixes that they stand for, in place."""
    for row in rows:
        shared = row.pop("shared")
        if shared is not None:
            base = rows[shared["call"]]
            stream = [*base["prompt_ids"], *base["completion_ids"]]
            row["prompt_ids"] = [*stream[: shared["ids"]], *row["prompt_ids"]]
            row["messages"] = [*base["messages"][: shared["messages"]], *row["messages"]]


def common_prefix_len(left: tuple[Any, ...], right: tuple[Any, ...]) -> int:
    """Return the number of equal items, such as ids or messages, at the start of two sequences."""
    # A binary search over slices, which are compared in C, is faster than a loop over the ids. O(n): slices halve, too.
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
