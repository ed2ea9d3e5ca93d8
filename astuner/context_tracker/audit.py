"""Checks and counts over calls and the samples made of them."""

from __future__ import annotations

from collections.abc import Sequence

from astuner.context_tracker.prefixes import count_distinct_prefixes, encode
from astuner.schema import LlmCall, Sample, TokenCounts


def count_tokens(calls: Sequence[LlmCall]) -> TokenCounts:
    """Count the tokens of one episode's calls (see `TokenCounts`)."""
    return TokenCounts(
        raw=sum(len(call.prompt_ids) + len(call.completion_ids) for call in calls),
        distinct=count_distinct_prefixes([encode(call) for call in calls]),
        trained=sum(len(call.completion_ids) for call in calls),
    )


def certificate(calls: Sequence[LlmCall], samples: Sequence[Sample]) -> float:
    """Return the share of calls that the samples rebuild exactly: 1.0 when nothing was lost or changed.

    A call counts as rebuilt when exactly one sample holds it and its prompt ids, completion ids and logprobs
    all stand there. Calls without a completion train nothing and are not counted.
    """
    homes: dict[str, list[tuple[Sample, int, int]]] = {}
    for sample in samples:
        for span in sample.spans:
            homes.setdefault(span.call_id, []).append((sample, span.start, span.end))
    trained = [call for call in calls if call.completion_ids]
    rebuilt = sum(_is_rebuilt(call, homes.get(call.call_id, [])) for call in trained)
    return rebuilt / len(trained) if trained else 1.0


def _is_rebuilt(call: LlmCall, homes: Sequence[tuple[Sample, int, int]]) -> bool:
    if len(homes) != 1:
        return False
    sample, start, end = homes[0]
    return (
        sample.token_ids[:start] == call.prompt_ids
        and sample.token_ids[start:end] == call.completion_ids
        and sample.logprobs[start:end] == call.logprobs
        and all(count > 0 for count in sample.loss_mask[start:end])
    )
