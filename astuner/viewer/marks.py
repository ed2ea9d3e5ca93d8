"""What is known of the tokens of a trie: who sampled them, where they are trained, and which are the template's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby, zip_longest
from typing import Any

from astuner.run_record import SampleUpdate, by_token, of_span
from astuner.schema import LlmCall, Sample
from astuner.viewer.trie import Trie


def sampled_runs(trie: Trie, calls: Sequence[LlmCall]) -> dict[int, list[dict[str, Any]]]:
    """Return by segment the stretches that calls sampled: the call's index, where from, and the logprobs."""
    found: dict[int, list[dict[str, Any]]] = {}
    for number, call in enumerate(calls):
        begin = len(call.prompt_ids)
        for segment, start, end in _pieces(trie, number, begin, begin + len(call.completion_ids)):
            first = trie.segments[segment].start + start - begin
            logprobs = [round(value, 4) for value in call.logprobs[first : first + end - start]]
            found.setdefault(segment, []).append({"call": number, "from": start, "logprobs": logprobs})
    return found


def trained_runs(
    trie: Trie, calls: Sequence[LlmCall], samples: Sequence[Sample], updates: Sequence[SampleUpdate]
) -> dict[int, list[dict[str, Any]]]:
    """Return by segment the stretches that samples train, each of one loss mask and advantage.

    `sample` is the sample's index, `from` and `to` (exclusive) are relative to the segment. `advantage` and `logprobs`,
    one a token by the trainer, are None where the record does not have them.
    """
    numbers = {call.call_id: number for number, call in enumerate(calls)}
    found: dict[int, list[dict[str, Any]]] = {}
    for index, (sample, update) in enumerate(zip_longest(samples, updates[: len(samples)])):
        nothing: list[float | None] = [None] * len(sample.loss_mask)
        advantages, logprobs = by_token(sample, update) if update else (nothing, nothing)
        for span in sample.spans:
            if span.call_id not in numbers:
                continue
            columns = [of_span(values, span) for values in (sample.loss_mask, advantages, logprobs)]
            for segment, start, end in _pieces(trie, numbers[span.call_id], span.start, span.end):
                first = trie.segments[segment].start + start - span.start
                piece = zip(*(column[first : first + end - start] for column in columns), strict=False)
                for entry in _stretches(index, start, piece):
                    # Two calls that sampled the same tokens lie on one stretch, whose mask counts both.
                    if entry not in found.setdefault(segment, []):
                        found[segment].append(entry)
    return found


def _stretches(sample: int, place: int, tokens: Iterable[tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    """Yield the stretches of (loss mask, advantage, logprob) from `place` on."""
    for (mask, advantage), run in groupby(tokens, key=lambda token: token[:2]):
        logprobs = [token[2] for token in run]
        known = None if None in logprobs else [round(logprob, 4) for logprob in logprobs]
        end = place + len(logprobs)
        yield {"sample": sample, "from": place, "to": end, "mask": mask, "advantage": advantage, "logprobs": known}
        place = end


def template_runs(trie: Trie, calls: Sequence[LlmCall], texts: Mapping[int, str]) -> dict[int, list[list[int]]]:
    """Return by segment the stretches [from, to (exclusive)] of prompts that are of no message's text.

    They are found by looking for the messages' texts, one after the other, in the text of the tokens. A template that
    writes a message otherwise than it was given (tool calls as JSON, for one) has it counted as the template's.
    """
    is_template: dict[int, bytearray] = {}
    longest = {trie.end(number): number for number in range(len(calls))}
    for leaf in trie.leaves():
        number = longest[leaf]
        call = calls[number]
        inside = _inside_messages(call, texts)
        for segment, start, end in _pieces(trie, number, 0, len(call.prompt_ids)):
            known = is_template.setdefault(segment, bytearray(len(trie.segments[segment].ids)))
            first = trie.segments[segment].start + start
            known[start:end] = bytes(0 if flag else 1 for flag in inside[first : first + end - start])
    return {segment: _runs(flags) for segment, flags in is_template.items()}


def _inside_messages(call: LlmCall, texts: Mapping[int, str]) -> bytearray:
    """Return for each token of a call's prompt 1 where it lies in a message's text."""
    pieces = [texts.get(number, "") for number in call.prompt_ids]
    ends = list(accumulate(map(len, pieces)))
    text = "".join(pieces)
    covered = bytearray(len(text) + 1)
    place = 0
    for message in call.messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in _texts(content):
            found = text.find(part, place) if part else -1
            if found >= 0:
                place = found + len(part)
                covered[found:place] = b"\x01" * len(part)
    inside = bytearray(len(pieces))
    for index, end in enumerate(ends):
        # A token that is partly the message's, such as a line end and its first word, is the message's.
        inside[index] = covered.find(1, end - len(pieces[index]), end) >= 0
    return inside


def _texts(content: object) -> list[str]:
    if isinstance(content, str):
        return [content.strip()]
    if isinstance(content, list):
        return [text for part in content if isinstance(part, dict) for text in _texts(part.get("text"))]
    return []


def _pieces(trie: Trie, call: int, begin: int, end: int) -> list[tuple[int, int, int]]:
    """Return where tokens `begin` to `end` of a call lie: (segment, from, to), relative to each segment."""
    found = []
    for number in trie.path(call):
        segment = trie.segments[number]
        start, stop = max(begin - segment.start, 0), min(end - segment.start, len(segment.ids))
        if start < stop:
            found.append((number, start, stop))
    return found


def _runs(flags: bytearray) -> list[list[int]]:
    found, place = [], 0
    for flag, run in groupby(flags):
        length = len(list(run))
        if flag:
            found.append([place, place + length])
        place += length
    return found
