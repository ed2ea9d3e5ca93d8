"""Finds the generated text in a rendered conversation, for chat templates that `renderers` does not support.

Trial renderings with a changed message show where the text of the message begins and ends. The text before an answer
is its prompt, as the template renders it with `add_generation_prompt`. The text after the answer is its end token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from astuner.model_tuner.template_bridge import SENTINEL, TEMPLATE_ERRORS

_EMPTY_THINKING = re.compile(r"<think>\s*</think>\s*")
# A text shares its first character with one of these at most, so that one of two trial renderings differs there.
_SENTINELS = (SENTINEL, "x" + SENTINEL)


@dataclass(frozen=True, slots=True)
class TemplateAnswers:
    """Finds the answers of a conversation in its rendered text.

    Attributes:
        render: maps messages, and whether to add the generation prompt, to text.
        ends: the texts of the tokens that end an answer.
    """

    render: Callable[[Sequence[Mapping[str, Any]], bool], str]
    ends: Collection[str]

    def tokens(
        self,
        messages: Sequence[Mapping[str, Any]],
        encode: Callable[[str], list[int]],
        decode: Callable[[Sequence[int]], str],
    ) -> tuple[list[int], list[bool]]:
        """Return a conversation's token ids, and whether each token is trained (both of length N).

        Answers are trained, unless their `weight` is 0.

        Every answer starts with a new token, as in a rollout, where the prompt is tokenised without the answer.

        Raises:
            TemplateError, ValueError, TypeError, LookupError: the template rejects the messages (`TEMPLATE_ERRORS`).
        """
        text, spans = self._find(messages)
        borders = [0, *(start for start, _, _ in spans), len(text)]
        pieces = [encode(text[start:end]) for start, end in pairwise(borders)]
        whole = encode(text)
        if decode([token for piece in pieces for token in piece]) != decode(whole):
            # The tokenizer adds a space to every text, so that parts of a conversation cannot be tokenised separately.
            trained = [False] * len(whole)
            for start, end, is_trained in spans:
                first, last = (_shared(encode(text[:place]), whole) for place in (start, end))
                trained[first:last] = [is_trained] * (last - first)
            return whole, trained
        ids, trained = list(pieces[0]), [False] * len(pieces[0])
        for (start, end, is_trained), piece, following in zip(spans, pieces[1:], borders[2:], strict=True):
            answer = encode(text[start:end])
            # Without an end token, the tokenizer may merge the end of an answer with the text after it.
            rest = piece[len(answer) :] if piece[: len(answer)] == answer else encode(text[end:following])
            ids += [*answer, *rest]
            trained += [is_trained] * len(answer) + [False] * len(rest)
        return ids, trained

    def _find(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[tuple[int, int, bool]]]:
        """Return the text of a conversation, and for each answer its start, its end with the end token, and whether it
        is trained.
        """
        text = self._finished(messages)
        spans: list[tuple[int, int, bool]] = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            last = self._first_change(text, messages, index, _with_changed_end)
            if last is None:  # the template leaves the message out
                continue
            start = self._start(text, messages, index, last, spans[-1][1] if spans else 0)
            spans.append((start, self._end(text, messages, index, max(start, last)), is_trained(message)))
        return text, spans

    def _finished(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the text of a conversation.

        Some templates reject a conversation that ends with an answer, unless they add a generation prompt.
        """
        try:
            return self.render(messages, False)
        except TEMPLATE_ERRORS:
            return self.render(messages, True)

    def _start(self, text: str, messages: Sequence[Mapping[str, Any]], index: int, last: int, lowest: int) -> int:
        """Return the index of the first character after the prompt for the answer `messages[index]`."""
        prompt = self._try_render(messages[:index], True)
        if prompt and len(prompt) <= last and text.startswith(prompt):
            return len(prompt)
        # The template renders earlier turns differently if later turns follow. The generation prompt is then the part
        # of the prompt that follows the earlier messages. The conversation may contain only the beginning of this part,
        # because some generation prompts open the thinking with a tag, which the template omits from a finished
        # conversation.
        changed = self._first_change(text, messages, index, _with_changed_start)
        first = last if changed is None else min(last, changed)
        opening = prompt[_shared(prompt, self._try_render(messages[:index], False)) :]
        for size in (len(opening), *(place for place in range(len(opening) - 1, 0, -1) if opening[place] == "<")):
            place = text.rfind(opening[:size], lowest, first) if size else -1
            if place >= 0:
                return place + size
        return first

    def _end(self, text: str, messages: Sequence[Mapping[str, Any]], index: int, last: int) -> int:
        """Return the index after the answer's end token, or after the answer if it has no end token."""
        limit = len(text)
        if index + 1 < len(messages):
            following = self._first_change(text, messages, index + 1, _with_changed_start)
            limit = limit if following is None else following
        found = [(place, len(end)) for end in self.ends if (place := text.find(end, last, limit)) >= 0]
        if found:
            return sum(min(found))
        until = self._try_render(messages[: index + 1], False)
        return len(until) if until and text.startswith(until) else last

    def _first_change(
        self,
        text: str,
        messages: Sequence[Mapping[str, Any]],
        index: int,
        change: Callable[[Mapping[str, Any], str], Mapping[str, Any]],
    ) -> int | None:
        """Return the index of the first character that differs if `messages[index]` is changed; None if none does."""
        places = []
        for sentinel in _SENTINELS:
            try:
                changed = self._finished([*messages[:index], change(messages[index], sentinel), *messages[index + 1 :]])
            except TEMPLATE_ERRORS:
                continue
            if changed != text:
                places.append(_shared(text, changed))
        return min(places, default=None)

    def _try_render(self, messages: Sequence[Mapping[str, Any]], prompt: bool) -> str:
        """Return the text of the messages; nothing if the template rejects them."""
        try:
            return self.render(messages, prompt)
        except TEMPLATE_ERRORS:
            return ""


def is_trained(message: Mapping[str, Any]) -> bool:
    """Return whether a message of a transcript is trained: `weight` is 0 for an answer that is context only."""
    return bool(message["role"] == "assistant" and message.get("weight", 1) != 0)


def without_empty_thinking(
    mask: Sequence[bool], ids: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> list[bool]:
    """Return a mask of generated tokens without the empty thinking that a template writes before an answer."""
    result = list(mask)
    for start in [index for index, value in enumerate(mask) if value and not (index and mask[index - 1])]:
        stop = next((index for index in range(start, len(mask)) if not mask[index]), len(mask))
        if (match := _EMPTY_THINKING.match(decode(ids[start : min(stop, start + 16)]))) is None:
            continue
        end = next(end for end in range(start + 1, stop + 1) if len(decode(ids[start:end])) >= match.end())
        result[start:end] = [False] * (end - start)
    return result


def _shared(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Return the length of the common prefix."""
    return next(
        (index for index, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )


def _with_changed_start(message: Mapping[str, Any], sentinel: str) -> dict[str, Any]:
    """Return a message whose first generated text is changed."""
    if message.get("reasoning_content"):
        return {**message, "reasoning_content": sentinel + str(message["reasoning_content"])}
    if message.get("tool_calls") and not message.get("content"):
        first, *others = message["tool_calls"]
        function = {**first["function"], "name": sentinel + str(first["function"]["name"])}
        return {**message, "tool_calls": [{**first, "function": function}, *others]}
    return {**message, "content": sentinel + str(message.get("content") or "")}


def _with_changed_end(message: Mapping[str, Any], sentinel: str) -> dict[str, Any]:
    """Return a message whose last generated text is changed."""
    if message.get("tool_calls"):
        *others, last = message["tool_calls"]
        function = {**last["function"], "name": str(last["function"]["name"]) + sentinel}
        return {**message, "tool_calls": [*others, {**last, "function": function}]}
    return {**message, "content": str(message.get("content") or "") + sentinel}
