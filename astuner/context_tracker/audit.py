"""Token counts and lengths of calls, and the certificate that samples reproduce their calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from astuner.context_tracker.packing import ID_BYTES, count_distinct_prefixes, encode
from astuner.schema import CallSpan, LlmCall, Sample, TokenCounts, view_of


def count_tokens(calls: Sequence[LlmCall]) -> TokenCounts:
    """Count the tokens of one episode's calls (see `TokenCounts`)."""
    return TokenCounts(
        raw=sum(len(call.prompt_ids) + len(call.completion_ids) for call in calls),
        distinct=count_distinct_prefixes([encode(call) for call in calls]),
        trained=sum(len(call.completion_ids) for call in calls if call.trained),
    )


def response_length(calls: Sequence[LlmCall]) -> int:
    """Return the number of tokens after the first prompt in an episode's longest conversation.

    A call continues the conversation of an earlier call if its prompt begins with that call's tokens, or if it forks
    from that call. The length depends on the calls only, not on how they become samples.

    Args:
        calls: the episode's calls, in order of completion; only trained calls count for the maximum.

    Returns:
        The length in tokens; 0 if no call is trained.
    """
    index_of = {call.call_id: index for index, call in enumerate(calls)}
    # Only an earlier call can be continued, so following the links ends.
    continued = [
        None if call.fork is None or index_of.get(call.fork.call_id, index) >= index else index_of[call.fork.call_id]
        for index, call in enumerate(calls)
    ]
    # In sorted order, the sequences that a sequence extends are those on the stack.
    stack: list[tuple[bytes, int]] = []
    for encoded, index in sorted((encode(call), index) for index, call in enumerate(calls)):
        while stack and not encoded.startswith(stack[-1][0]):
            stack.pop()
        if continued[index] is None:
            prompt_bytes = len(calls[index].prompt_ids) * ID_BYTES
            extended = (other for tokens, other in reversed(stack) if len(tokens) <= prompt_bytes and other < index)
            continued[index] = next(extended, None)
        if calls[index].prompt_ids:  # the tokens of an external model's call are unknown
            stack.append((encoded, index))
    first_prompts: list[int] = []
    for call, earlier in zip(calls, continued, strict=True):
        first_prompts.append(len(call.prompt_ids) if earlier is None else first_prompts[earlier])
    return max(
        (
            len(call.prompt_ids) + len(call.completion_ids) - first
            for call, first in zip(calls, first_prompts, strict=True)
            if call.trained and call.completion_ids
        ),
        default=0,
    )


def certificate(calls: Sequence[LlmCall], samples: Sequence[Sample]) -> float:
    """Return the fraction of calls that the samples reproduce exactly; 1.0 if nothing was lost, changed or added.

    A call is reproduced if exactly one sample contains it, with the same prompt ids, completion ids and logprobs, and
    if that sample trains each token as often as its calls sampled it. The result is 0 if a sample trains tokens but
    contains no call. Calls that train nothing are ignored: those without a completion, and those of frozen targets.
    """
    locations: dict[str, list[tuple[Sample, CallSpan]]] = {}
    for sample in samples:
        if not sample.spans and any(sample.train_counts):
            return 0.0
        if _is_consistent(sample):
            for span in sample.spans:
                locations.setdefault(span.call_id, []).append((sample, span))
    trained = [call for call in calls if call.trained and call.completion_ids]
    reproduced = sum(_is_reproduced(call, locations.get(call.call_id, [])) for call in trained)
    return reproduced / len(trained) if trained else 1.0


def describe_masks(calls: Sequence[LlmCall], samples: Sequence[Sample], *, is_whole: bool = True) -> str:
    """Describe how the samples' masks differ from the tokens that the model sampled in `calls`; "" if they do not.

    Args:
        is_whole: whether the samples must contain each call that is trained.
    """
    context, missed, changed, lost = 0, 0, 0, 0
    by_id = {call.call_id: call for call in calls}
    if is_whole:
        contained = {span.call_id for sample in samples for span in sample.spans}
        lost = sum(call.trained and bool(call.completion_ids) and call.call_id not in contained for call in calls)
    for sample in samples:
        ids, counts = np.asarray(sample.token_ids), np.asarray(sample.train_counts)
        size = min(len(ids), len(counts))
        expected = np.zeros(len(ids), np.int64)
        for span in sample.spans:
            call, nodes = by_id.get(span.call_id), _nodes(span)
            np.add.at(expected, nodes, 1)
            changed += call is None or not np.array_equal(ids[nodes], call.completion_ids)
        context += int((counts[:size] > expected[:size]).sum())
        missed += int((counts[:size] < expected[:size]).sum())
    mask = [
        f"trains {context} tokens that the model did not sample (prompts or results of tools)" if context else "",
        f"misses {missed} tokens that the model sampled" if missed else "",
    ]
    parts = [
        f"the loss mask {' and '.join(filter(None, mask))}" if any(mask) else "",
        f"{changed} calls have different tokens than were sampled" if changed else "",
        f"{lost} calls are in no sample" if lost else "",
    ]
    return "; ".join(filter(None, parts))


def _nodes(span: CallSpan) -> NDArray[np.int64]:
    return np.arange(span.start, span.end) if span.nodes is None else np.array(span.nodes, np.int64)


def _is_consistent(sample: Sample) -> bool:
    """Return whether the position ids match the tokens, and the train counts match the spans."""
    counts = np.zeros(len(sample.token_ids), np.int64)
    for span in sample.spans:
        np.add.at(counts, _nodes(span), 1)
    depths: list[int] | NDArray[Any] = np.arange(len(counts))
    if sample.parents is not None:
        depths = []
        for parent in sample.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return np.array_equal(sample.train_counts, counts) and np.array_equal(sample.position_ids, depths)


def _is_reproduced(call: LlmCall, locations: Sequence[tuple[Sample, CallSpan]]) -> bool:
    if len(locations) != 1:
        return False
    sample, span = locations[0]
    if (nodes := span.nodes) is not None:
        assert sample.parents is not None
        parents = [sample.parents[node] for node in nodes]
        # Where a node follows its parent, only the parent's ancestors must be checked.
        starts = [(k, node) for k, node in enumerate(nodes) if k == 0 or parents[k] != nodes[k - 1]]
        return (
            tuple(sample.token_ids[node] for node in nodes) == call.completion_ids
            and tuple(sample.logprobs[node] for node in nodes) == call.logprobs
            and all(_ancestor_ids(sample, node) == call.prompt_ids + call.completion_ids[:k] for k, node in starts)
        )
    return (
        view_of(sample.token_ids, 0, span.start) == call.prompt_ids
        and view_of(sample.token_ids, span.start, span.end) == call.completion_ids
        and view_of(sample.logprobs, span.start, span.end) == call.logprobs
    )


def _ancestor_ids(sample: Sample, node: int) -> tuple[int, ...]:
    """Return the token ids of a node's ancestors in a tree sample, from the root on."""
    assert sample.parents is not None
    ids = []
    while (node := sample.parents[node]) >= 0:
        ids.append(sample.token_ids[node])
    return tuple(reversed(ids))
