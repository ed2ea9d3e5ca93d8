"""Merge the calls of an episode into the fewest training samples, without changing what is trained.

Exactness: every call's prompt and completion is rebuilt from the sample that trains it, and each sampled token is
trained exactly once per time that it was sampled, with the logprob it was sampled with.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, islice, takewhile
from typing import Literal

from astuner.context_tracker.packing import pack_encoded
from astuner.context_tracker.prefixes import encode
from astuner.schema import CallSpan, LlmCall, Sample

MergeMode = Literal["leaf", "tree", "none"]


# Rows that one call is tried on. More begin alike only where a token was sampled anew again and again; without a bound,
# time would grow with the square of their number.
_MOST_TRIES = 64

_Credit = tuple[str, float] | None


@dataclass(eq=False)
class _Row:
    """A row under construction: a path through the trie, and the calls trained on it.

    Attributes:
        encoded: its token ids, see `encode`.
        token_ids: the same.
        calls: those trained on it.
        counts: how often each token is trained.
        logprobs: as sampled. Both are arrays, which the garbage collector does not look into.
        credits: what each trained token is rewarded for apart from its episode, as far as that is anything.
    """

    encoded: bytes
    token_ids: tuple[int, ...]
    calls: list[LlmCall] = field(default_factory=list)
    counts: array[int] = field(init=False)
    logprobs: array[float] = field(init=False)
    credits: dict[int, _Credit] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.counts = array("L", [0]) * len(self.token_ids)
        self.logprobs = array("d", [0.0]) * len(self.token_ids)

    def accepts(self, call: LlmCall) -> bool:
        """Whether no token of the call was already sampled here with another logprob, or for another reward."""
        start, end = _span(call)
        taken = self.counts[start:end]
        if not any(taken):
            return True
        credit = _credit(call)
        sampled = zip(range(start, end), taken, self.logprobs[start:end], call.logprobs, strict=True)
        return all(
            logprob == own and self.credits.get(place) == credit for place, count, logprob, own in sampled if count
        )

    def add(self, call: LlmCall) -> None:
        start, end = _span(call)
        self.counts[start:end] = array("L", [count + 1 for count in self.counts[start:end]])
        self.logprobs[start:end] = array("d", call.logprobs)
        if (credit := _credit(call)) is not None:
            self.credits.update(dict.fromkeys(range(start, end), credit))
        self.calls.append(call)


def build_samples(calls: Iterable[LlmCall], merge: MergeMode = "leaf") -> list[Sample]:
    """Turn the calls of one episode into training samples.

    Args:
        calls: the calls, in any order; those without a completion token, and those that are not to be trained, train
            nothing and are left out.
        merge: `leaf` makes one row per root-to-leaf path of the token trie over all calls, whatever agent
            made them; `none` makes one row per call; `tree` makes one sample of the whole trie, each token once.

    Returns:
        Samples in an order that does not depend on the order of `calls`. Weights sum to 1.

    Raises:
        ValueError: a call's logprobs do not match its completion.
    """
    trained = [call for call in calls if call.trained and call.completion_ids]
    for call in trained:
        if len(call.logprobs) != len(call.completion_ids):
            raise ValueError(
                f"call {call.call_id} has {len(call.completion_ids)} completion tokens "
                f"but {len(call.logprobs)} logprobs"
            )
    ordered = sorted(((encode(call), call) for call in trained), key=lambda pair: (pair[0], _identity(pair[1])))
    rows = [_row_of(encoded, call) for encoded, call in ordered] if merge == "none" else _leaf_rows(ordered)
    if merge == "tree":
        return [_tree(rows)] if rows else []
    total = sum(len(call.completion_ids) for call in trained)
    positions = tuple(range(max((len(row.token_ids) for row in rows), default=0)))
    return [_finish(row, positions, total) for row in rows]


def limit_samples(samples: Sequence[Sample], most: int, seed: int) -> tuple[list[Sample], int]:
    """Keep at most `most` samples of an episode and say how many were dropped.

    Whole timelines are dropped, never parts of one. The rule: samples are ranked by the BLAKE2 hash of seed,
    episode and call ids, and the first `most` stay (in their order); the weights of those that stay are
    scaled to sum to 1 again, so that the episode keeps its weight.
    """
    if len(samples) <= most:
        return list(samples), 0

    def rank(sample: Sample) -> bytes:
        calls = ",".join(span.call_id for span in sample.spans)
        return hashlib.blake2b(f"{seed}|{sample.episode_id}|{calls}".encode(), digest_size=8).digest()

    chosen = {id(sample) for sample in sorted(samples, key=rank)[:most]}
    kept = [sample for sample in samples if id(sample) in chosen]
    total = sum(sample.weight for sample in kept)
    return [replace(sample, weight=sample.weight / total) for sample in kept], len(samples) - most


def _identity(call: LlmCall) -> tuple[int, tuple[float, ...], str]:
    return len(call.prompt_ids), call.logprobs, call.call_id


def _credit(call: LlmCall) -> _Credit:
    """What a call is rewarded for apart from its episode: calls that differ in it have advantages of their own."""
    return None if call.reward is None else (call.agent_name, call.reward)


def _span(call: LlmCall) -> tuple[int, int]:
    start = len(call.prompt_ids)
    return start, start + len(call.completion_ids)


def _row_of(encoded: bytes, call: LlmCall) -> _Row:
    row = _Row(encoded, call.prompt_ids + call.completion_ids)
    row.add(call)
    return row


def _leaf_rows(ordered: Sequence[tuple[bytes, LlmCall]]) -> list[_Row]:
    """One row per leaf, more only where one token was sampled twice with different logprobs or rewards."""
    rows: list[_Row] = []
    # From the back, the rows that a sequence is a prefix of are the last ones made.
    for (encoded, _), alike in groupby(reversed(ordered), key=lambda pair: (pair[0], len(pair[1].prompt_ids))):
        begin_so = takewhile(partial(_begins_with, encoded), reversed(rows))
        homes: dict[tuple[tuple[float, ...], _Credit], _Row] = {}
        refused: list[_Row] = []
        for _, call in alike:
            way = call.logprobs, _credit(call)
            home = homes.get(way) or _first_accepting(call, refused, begin_so)
            if home is None:
                home = _row_of(encoded, call)
                rows.append(home)
            else:
                home.add(call)
            homes[way] = home
    rows.reverse()
    return rows


def _begins_with(encoded: bytes, row: _Row) -> bool:
    return row.encoded.startswith(encoded)


def _first_accepting(call: LlmCall, refused: list[_Row], others: Iterator[_Row]) -> _Row | None:
    """Return a row for a call: one that refused a call of the same tokens before, or the first of the others.

    A row that took one of them has no room for the same tokens sampled in another way.
    """
    for row in refused:
        if row.accepts(call):
            refused.remove(row)
            return row
    for row in islice(others, _MOST_TRIES):
        if row.accepts(call):
            return row
        if len(refused) < _MOST_TRIES:
            refused.append(row)
    return None


def _finish(row: _Row, positions: tuple[int, ...], episode_tokens: int) -> Sample:
    logprobs = [0.0] * len(row.token_ids)
    for call in row.calls:
        logprobs[slice(*_span(call))] = call.logprobs
    return Sample(
        token_ids=row.token_ids,
        loss_mask=tuple(row.counts),
        logprobs=tuple(logprobs),
        position_ids=positions[: len(row.token_ids)],
        weight=sum(row.counts) / episode_tokens,
        spans=tuple(CallSpan(call.call_id, *_span(call)) for call in sorted(row.calls, key=_identity)),
        episode_id=row.calls[0].episode_id,
    )


def _tree(rows: Sequence[_Row]) -> Sample:
    """All rows as one sample: the nodes of their trie, and a copy of each that was sampled in more than one way."""
    packing = pack_encoded([row.encoded for row in rows])
    ids, parents, positions = (array.tolist() for array in (packing.token_ids, packing.parents, packing.positions))
    counts, logprobs = [0] * len(ids), [0.0] * len(ids)
    stands: dict[tuple[int, float, object], int] = {}

    def stand(node: int, logprob: float, credit: object) -> int:
        """Count a sampled token at the node that has its logprob and reward; make that node if there is none."""
        if (node, logprob, credit) not in stands:
            place = node
            if counts[node]:
                place = len(ids)
                for values in (ids, parents, positions):
                    values.append(values[node])
                counts.append(0)
                logprobs.append(0.0)
            stands[node, logprob, credit] = place
            logprobs[place] = logprob
        place = stands[node, logprob, credit]
        counts[place] += 1
        return place

    spans = []
    for row, places in zip(rows, packing.places, strict=True):
        for call in sorted(row.calls, key=_identity):
            start, end = _span(call)
            sampled = zip(places[start:end].tolist(), call.logprobs, strict=True)
            nodes = tuple(stand(node, logprob, _credit(call)) for node, logprob in sampled)
            spans.append(CallSpan(call.call_id, start, end, nodes))
    return Sample(
        token_ids=tuple(ids),
        loss_mask=tuple(counts),
        logprobs=tuple(logprobs),
        position_ids=tuple(positions),
        weight=1.0,
        spans=tuple(spans),
        episode_id=rows[0].calls[0].episode_id,
        parents=tuple(parents),
    )
