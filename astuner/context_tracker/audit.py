"""Checks and counts over calls and the samples made of them."""

from __future__ import annotations

from collections.abc import Sequence

from astuner.context_tracker.prefixes import count_distinct_prefixes, encode
from astuner.schema import CallSpan, LlmCall, Sample, TokenCounts


def count_tokens(calls: Sequence[LlmCall]) -> TokenCounts:
    """Count the tokens of one episode's calls (see `TokenCounts`)."""
    return TokenCounts(
        raw=sum(len(call.prompt_ids) + len(call.completion_ids) for call in calls),
        distinct=count_distinct_prefixes([encode(call) for call in calls]),
        trained=sum(len(call.completion_ids) for call in calls if call.trained),
    )


def certificate(calls: Sequence[LlmCall], samples: Sequence[Sample]) -> float:
    """Return the share of calls that the samples rebuild exactly: 1.0 when nothing was lost, changed or added.

    A call counts as rebuilt when exactly one sample holds it, its prompt ids, completion ids and logprobs all stand
    there, and that sample trains each of its tokens as often as its calls sampled it. A sample that trains tokens and
    holds no call makes the share 0. Calls that train nothing are not counted: those without a completion, and those of
    targets that are not trained.
    """
    homes: dict[str, list[tuple[Sample, CallSpan]]] = {}
    for sample in samples:
        if not sample.spans and any(sample.loss_mask):
            return 0.0
        if _is_sound(sample):
            for span in sample.spans:
                homes.setdefault(span.call_id, []).append((sample, span))
    trained = [call for call in calls if call.trained and call.completion_ids]
    rebuilt = sum(_is_rebuilt(call, homes.get(call.call_id, [])) for call in trained)
    return rebuilt / len(trained) if trained else 1.0


def _is_sound(sample: Sample) -> bool:
    """Whether positions are those of the tokens, and the mask counts what the spans say was sampled."""
    counts = [0] * len(sample.token_ids)
    for span in sample.spans:
        for place in range(span.start, span.end) if span.nodes is None else span.nodes:
            counts[place] += 1
    if sample.parents is None:
        depths: Sequence[int] = range(len(counts))
    else:
        depths = []
        for parent in sample.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return tuple(counts) == sample.loss_mask and tuple(depths) == sample.position_ids


def _is_rebuilt(call: LlmCall, homes: Sequence[tuple[Sample, CallSpan]]) -> bool:
    if len(homes) != 1:
        return False
    sample, span = homes[0]
    if span.nodes is not None:
        return _stands_in_tree(call, sample, span.nodes)
    return (
        sample.token_ids[: span.start] == call.prompt_ids
        and sample.token_ids[span.start : span.end] == call.completion_ids
        and sample.logprobs[span.start : span.end] == call.logprobs
    )


def _stands_in_tree(call: LlmCall, sample: Sample, nodes: Sequence[int]) -> bool:
    return (
        tuple(sample.token_ids[node] for node in nodes) == call.completion_ids
        and tuple(sample.logprobs[node] for node in nodes) == call.logprobs
        and all(
            _before(sample, node) == call.prompt_ids + call.completion_ids[:offset]
            for offset, node in _where_paths_begin(sample, nodes)
        )
    )


def _where_paths_begin(sample: Sample, nodes: Sequence[int]) -> list[tuple[int, int]]:
    """The first node, and those that do not follow the one before: their ancestors have to be looked at one by one."""
    assert sample.parents is not None
    parents = [sample.parents[node] for node in nodes]
    return [(k, node) for k, node in enumerate(nodes) if k == 0 or parents[k] != nodes[k - 1]]


def _before(sample: Sample, node: int) -> tuple[int, ...]:
    """The tokens on the way from the root to a node of a tree sample, the node itself left out."""
    assert sample.parents is not None
    ids = []
    while (node := sample.parents[node]) >= 0:
        ids.append(sample.token_ids[node])
    return tuple(reversed(ids))
