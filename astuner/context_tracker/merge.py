"""Merge the calls of an episode into the fewest training rows, without changing what is trained.

Exactness: every call's prompt and completion is a prefix of the row that trains it, and each sampled token is
trained exactly once per time that it was sampled, with the logprob it was sampled with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from astuner.context_tracker.prefixes import as_ids, encode
from astuner.schema import CallSpan, LlmCall, Sample

MergeMode = Literal["leaf", "none"]


@dataclass
class _Row:
    """A row under construction: a path through the trie and the calls trained on it."""

    encoded: bytes
    calls: list[LlmCall] = field(default_factory=list)
    logprob_at: dict[int, float] = field(default_factory=dict)

    def accepts(self, call: LlmCall) -> bool:
        """Whether no token of the call was already sampled here with another logprob."""
        start = len(call.prompt_ids)
        return all(
            self.logprob_at.get(start + offset, logprob) == logprob for offset, logprob in enumerate(call.logprobs)
        )

    def add(self, call: LlmCall) -> None:
        start = len(call.prompt_ids)
        self.logprob_at.update({start + offset: logprob for offset, logprob in enumerate(call.logprobs)})
        self.calls.append(call)


def build_samples(calls: Iterable[LlmCall], merge: MergeMode = "leaf") -> list[Sample]:
    """Turn the calls of one episode into training samples.

    Args:
        calls: the calls, in any order; calls without a completion token train nothing and are left out.
        merge: `leaf` makes one row per root-to-leaf path of the token trie over all calls, whatever agent
            made them; `none` makes one row per call.

    Returns:
        Samples in an order that does not depend on the order of `calls`. Weights sum to 1.

    Raises:
        ValueError: a call's logprobs do not match its completion.
    """
    trained = [call for call in calls if call.completion_ids]
    for call in trained:
        if len(call.logprobs) != len(call.completion_ids):
            raise ValueError(
                f"call {call.call_id} has {len(call.completion_ids)} completion tokens "
                f"but {len(call.logprobs)} logprobs"
            )
    ordered = sorted(((encode(call), call) for call in trained), key=lambda pair: (pair[0], _identity(pair[1])))
    rows = _leaf_rows(ordered) if merge == "leaf" else [_single_row(encoded, call) for encoded, call in ordered]
    total = sum(len(call.completion_ids) for call in trained)
    return [_finish(row, total) for row in rows]


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
    return [_reweighted(sample, sample.weight / total) for sample in kept], len(samples) - most


def _identity(call: LlmCall) -> tuple[int, tuple[float, ...], str]:
    return len(call.prompt_ids), call.logprobs, call.call_id


def _single_row(encoded: bytes, call: LlmCall) -> _Row:
    row = _Row(encoded)
    row.add(call)
    return row


def _leaf_rows(ordered: Sequence[tuple[bytes, LlmCall]]) -> list[_Row]:
    """One row per leaf, more only where one token was sampled twice with different logprobs."""
    rows: list[_Row] = []
    # From the back, the rows that a sequence is a prefix of are the last ones made.
    for encoded, call in reversed(ordered):
        home = None
        for row in reversed(rows):
            if not row.encoded.startswith(encoded):
                break
            if row.accepts(call):
                home = row
                break
        if home is None:
            home = _Row(encoded)
            rows.append(home)
        home.add(call)
    rows.reverse()
    return rows


def _finish(row: _Row, episode_tokens: int) -> Sample:
    ids = tuple(as_ids(row.encoded).tolist())
    mask = [0] * len(ids)
    logprobs = [0.0] * len(ids)
    spans = []
    for call in sorted(row.calls, key=_identity):
        start = len(call.prompt_ids)
        end = start + len(call.completion_ids)
        for offset, logprob in enumerate(call.logprobs, start):
            mask[offset] += 1
            logprobs[offset] = logprob
        spans.append(CallSpan(call.call_id, start, end))
    return Sample(
        token_ids=ids,
        loss_mask=tuple(mask),
        logprobs=tuple(logprobs),
        position_ids=tuple(range(len(ids))),
        weight=sum(mask) / episode_tokens,
        spans=tuple(spans),
        episode_id=row.calls[0].episode_id,
    )


def _reweighted(sample: Sample, weight: float) -> Sample:
    return Sample(
        sample.token_ids,
        sample.loss_mask,
        sample.logprobs,
        sample.position_ids,
        weight,
        sample.spans,
        sample.episode_id,
    )
