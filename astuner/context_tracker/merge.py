"""Merges the calls of an episode into the fewest training samples without changing what is trained.

Merging is exact: the prompt and completion of every call can be reproduced from the sample that trains it, and each
token is trained as often as it was sampled, with the logprob that it was sampled with.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, islice, pairwise, takewhile
from typing import Literal

import numpy as np

from astuner.context_tracker.packing import encode, pack_encoded
from astuner.errors import shorten
from astuner.schema import AgentStep, CallSpan, Ints, LlmCall, Packed, Part, Sample, concatenate, pack_floats, pack_ints

MergeMode = Literal["leaf", "tree", "none"]


# The maximum number of rows that are tried for a call. More rows share a prefix only if a token was sampled many times;
# without a limit, the time would be quadratic in their number.
_MAX_TRIES = 64

_Credit = tuple[str, float | None, AgentStep | None] | None
_TrainingKey = tuple[_Credit, float]
"""The credit and the temperature of a call."""


@dataclass(eq=False)
class _Row:
    """A row under construction: a path through the trie, and the calls that are trained on it.

    Attributes:
        encoded: the token ids, encoded (see `encode`).
        calls: the calls that are trained on the row.
        counts: how often each token is trained.
        credits: by index, the agent, the reward and the step of trained tokens whose call has its own reward or step.
    """

    # `counts` and `logprobs` are arrays, because the garbage collector does not traverse arrays.

    encoded: bytes
    token_ids: Ints
    calls: list[LlmCall] = field(default_factory=list)
    counts: array[int] = field(init=False)
    logprobs: array[float] = field(init=False)
    credits: dict[int, _Credit] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.counts = array("L", [0]) * len(self.token_ids)
        self.logprobs = array("d", [0.0]) * len(self.token_ids)

    def accepts(self, call: LlmCall) -> bool:
        """Return whether no token of the call is already trained with another logprob, credit or temperature."""
        start, end = _span(call)
        counts = self.counts[start:end]
        if not any(counts):
            return True
        credit = _credit(call)
        tokens = zip(range(start, end), counts, self.logprobs[start:end], call.logprobs, strict=True)
        overlapping = (other for other in self.calls if _span(other)[0] < end and start < _span(other)[1])
        if any(other.sampling.temperature != call.sampling.temperature for other in overlapping):
            return False
        return all(old == new and self.credits.get(index) == credit for index, count, old, new in tokens if count)

    def add(self, call: LlmCall) -> None:
        start, end = _span(call)
        self.counts[start:end] = array("L", [count + 1 for count in self.counts[start:end]])
        self.logprobs[start:end] = array("d", call.logprobs)
        if (credit := _credit(call)) is not None:
            self.credits.update(dict.fromkeys(range(start, end), credit))
        self.calls.append(call)


def build_samples(calls: Iterable[LlmCall], merge: MergeMode = "leaf") -> list[Sample]:
    """Return the training samples for one episode's calls.

    Args:
        calls: the calls, in any order; calls without a completion and calls that are not trained are ignored.
        merge: `leaf` makes one row per root-to-leaf path in the token trie over all agents' calls; `none` makes
            one row per call; `tree` makes one sample of the whole trie, in which each token occurs once.

    Returns:
        The samples, in an order that does not depend on the order of `calls`. Their weights sum to 1.

    Raises:
        ValueError: a call has more or fewer logprobs than completion tokens.
    """
    trained = [call for call in calls if call.trained and call.completion_ids]
    for call in trained:
        if len(call.logprobs) != len(call.completion_ids):
            raise ValueError(
                f"call {shorten(call.call_id)} has {len(call.completion_ids)} completion tokens "
                f"but {len(call.logprobs)} logprobs"
            )
    ordered = sorted(((encode(call), call) for call in trained), key=lambda pair: (pair[0], _identity(pair[1])))
    rows = [_new_row(encoded, call) for encoded, call in ordered] if merge == "none" else _leaf_rows(ordered)
    if merge == "tree":
        return [_to_tree_sample(rows)] if rows else []
    total = sum(len(call.completion_ids) for call in trained)
    positions = range(max((len(row.token_ids) for row in rows), default=0))
    return [_to_sample(row, positions, total) for row in rows]


def limit_samples(samples: Sequence[Sample], max_samples: int, seed: int) -> tuple[list[Sample], int]:
    """Return at most `max_samples` samples from an episode, and the number of dropped samples.

    Only whole samples are dropped. Samples are ranked by the BLAKE2 hash of seed, episode and call ids, and the first
    `max_samples` are kept, in their order. Their weights are scaled to sum to 1, so that the episode keeps its weight.
    """
    if len(samples) <= max_samples:
        return list(samples), 0

    def rank(sample: Sample) -> bytes:
        calls = ",".join(span.call_id for span in sample.spans)
        return hashlib.blake2b(f"{seed}|{sample.episode_id}|{calls}".encode(), digest_size=8).digest()

    chosen_ids = {id(sample) for sample in sorted(samples, key=rank)[:max_samples]}
    chosen_samples = [sample for sample in samples if id(sample) in chosen_ids]
    total = sum(sample.weight for sample in chosen_samples)
    return [replace(sample, weight=sample.weight / total) for sample in chosen_samples], len(samples) - max_samples


def _identity(call: LlmCall) -> tuple[int, tuple[float, ...], str]:
    return len(call.prompt_ids), tuple(call.logprobs), call.call_id


def _credit(call: LlmCall) -> _Credit:
    """Return the agent, the reward and the step of a call; calls that differ in them may differ in advantage.

    It is None for a call that has neither a reward nor a step of its own.
    """
    return None if call.reward is None and call.step is None else (call.agent_name, call.reward, call.step)


def _training_key(call: LlmCall) -> _TrainingKey:
    """Return the credit and the temperature of a call. Calls that differ in them cannot share trained tokens."""
    return _credit(call), call.sampling.temperature


def _span(call: LlmCall) -> tuple[int, int]:
    start = len(call.prompt_ids)
    return start, start + len(call.completion_ids)


def _new_row(encoded: bytes, call: LlmCall) -> _Row:
    row = _Row(encoded, concatenate(call.prompt_ids, call.completion_ids))
    row.add(call)
    return row


def _leaf_rows(ordered: Sequence[tuple[bytes, LlmCall]]) -> list[_Row]:
    """Return one row per leaf, and more if calls of one token differ in its logprob or in their training key."""
    rows: list[_Row] = []
    # Calls are visited in reverse order, so the rows that a sequence is a prefix of are the most recent ones.
    for (encoded, _), alike in groupby(reversed(ordered), key=lambda pair: (pair[0], len(pair[1].prompt_ids))):
        with_prefix = takewhile(partial(_has_prefix, encoded), reversed(rows))
        row_of: dict[tuple[tuple[float, ...], _TrainingKey], _Row] = {}
        rejecting: list[_Row] = []
        for _, call in alike:
            key = tuple(call.logprobs), _training_key(call)
            row = row_of.get(key) or _first_accepting(call, rejecting, with_prefix)
            if row is None:
                row = _new_row(encoded, call)
                rows.append(row)
            else:
                row.add(call)
            row_of[key] = row
    rows.reverse()
    return rows


def _has_prefix(encoded: bytes, row: _Row) -> bool:
    return row.encoded.startswith(encoded)


def _first_accepting(call: LlmCall, rejecting: list[_Row], others: Iterator[_Row]) -> _Row | None:
    """Return a row that accepts a call: one that rejected another call with the same tokens, or the first of `others`.

    A row that has accepted a call cannot accept the same tokens with other logprobs or another training key.
    """
    for row in rejecting:
        if row.accepts(call):
            rejecting.remove(row)
            return row
    for row in islice(others, _MAX_TRIES):
        if row.accepts(call):
            return row
        if len(rejecting) < _MAX_TRIES:
            rejecting.append(row)
    return None


def _logprobs(row: _Row) -> Packed[float]:
    """Return the logprobs of a row, which shares them with its calls."""
    parts: list[Part] = []
    known = 0
    shared: dict[int, int] = {}  # equal lengths are one object
    for call in sorted(row.calls, key=_span):  # calls that overlap have equal logprobs
        start, end = _span(call)
        if start > known:
            gap = start - known
            parts.append((0.0, 0, shared.setdefault(gap, gap)))
            known = start
        if end > known:
            packed = call.logprobs if isinstance(call.logprobs, Packed) else pack_floats(call.logprobs)
            parts += packed.view(known - start, end - start).parts()
            known = end
    return Packed([*parts, (0.0, 0, len(row.counts) - known)])


def _to_sample(row: _Row, positions: range, episode_tokens: int) -> Sample:
    counts = row.counts
    ends = [*(np.flatnonzero(np.diff(np.frombuffer(counts, counts.typecode))) + 1).tolist(), len(counts)]
    runs = ((start, end - start) for start, end in pairwise([0, *ends]))
    shared: dict[int, int] = {}  # equal lengths are one object
    return Sample(
        token_ids=row.token_ids,
        train_counts=Packed([(counts[start], 0, shared.setdefault(length, length)) for start, length in runs]),
        logprobs=_logprobs(row),
        position_ids=Packed([(positions, 0, len(row.token_ids))]),
        weight=sum(row.counts) / episode_tokens,
        spans=tuple(CallSpan(call.call_id, *_span(call)) for call in sorted(row.calls, key=_identity)),
        episode_id=row.calls[0].episode_id,
    )


def _to_tree_sample(rows: Sequence[_Row]) -> Sample:
    """Return all rows as one tree: their trie, with a copy of a node for each further logprob or training key."""
    packing = pack_encoded([row.encoded for row in rows])
    ids, parents, positions = (array.tolist() for array in (packing.token_ids, packing.parents, packing.positions))
    counts, logprobs = [0] * len(ids), [0.0] * len(ids)
    sampled_nodes: dict[tuple[int, float, _TrainingKey], int] = {}

    def count(node: int, logprob: float, training_key: _TrainingKey) -> int:
        """Count a sampled token, and return the node with its logprob and training key, which is created if needed."""
        key = node, logprob, training_key
        if key not in sampled_nodes:
            if counts[node]:
                for values in (ids, parents, positions):
                    values.append(values[node])
                counts.append(0)
                logprobs.append(0.0)
                node = len(ids) - 1
            sampled_nodes[key] = node
            logprobs[node] = logprob
        node = sampled_nodes[key]
        counts[node] += 1
        return node

    spans = []
    for row, places in zip(rows, packing.places, strict=True):
        for call in sorted(row.calls, key=_identity):
            start, end = _span(call)
            sampled = zip(places[start:end].tolist(), call.logprobs, strict=True)
            nodes = tuple(count(node, logprob, _training_key(call)) for node, logprob in sampled)
            spans.append(CallSpan(call.call_id, start, end, nodes))
    return Sample(
        token_ids=pack_ints(ids),
        train_counts=pack_ints(counts),
        logprobs=pack_floats(logprobs),
        position_ids=pack_ints(positions),
        weight=1.0,
        spans=tuple(spans),
        episode_id=rows[0].calls[0].episode_id,
        parents=pack_ints(parents),
    )
