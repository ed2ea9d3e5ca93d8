"""Finds the generated tokens in a rendered conversation, for chat templates that `renderers` does not support.

Trial renderings with a changed message show where the text of the message begins and ends. The tokens before an answer
are its prompt, as the template renders it with `add_generation_prompt`. The token after the answer is its end token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from astuner.model_tuner.template_bridge import SENTINEL, TEMPLATE_ERRORS

_EMPTY_THINKING = re.compile(r"<think>\s*</think>\s*")


@dataclass(frozen=True, slots=True)
class TemplateAnswers:
    """Finds the answers of a conversation in its tokens.

    Attributes:
        render: maps messages, and whether to add the generation prompt, to token ids.
        stop_token_ids: the tokens that end an answer.
    """

    render: Callable[[Sequence[Mapping[str, Any]], bool], Sequence[int]]
    stop_token_ids: Collection[int]

    def find(self, messages: Sequence[Mapping[str, Any]]) -> tuple[Sequence[int], list[tuple[int, int]]]:
        """Return the ids of a conversation, and the (start, end) of each answer in them, with its end token.

        Raises:
            TemplateError, ValueError, TypeError, LookupError: the template rejects the messages (`TEMPLATE_ERRORS`).
        """
        ids = self._finished(messages)
        spans: list[tuple[int, int]] = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            last = self._first_change(ids, messages, index, _with_changed_end(message))
            if last == len(ids):  # the template leaves the message out
                continue
            start = self._start(ids, messages, index, last, spans[-1][1] if spans else 0)
            end = self._end(ids, messages, index, max(start, last))
            spans.append((start, end))
        return ids, spans

    def _finished(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[int]:
        """Return the ids of a conversation.

        Some templates reject a conversation that ends with an answer, unless they add a generation prompt.
        """
        try:
            return self.render(messages, False)
        except TEMPLATE_ERRORS:
            return self.render(messages, True)

    def _start(
        self, ids: Sequence[int], messages: Sequence[Mapping[str, Any]], index: int, last: int, lowest: int
    ) -> int:
        """Return the index of the first token after the prompt for the answer `messages[index]`."""
        prompt = self._try_render(messages[:index], True)
        if prompt and len(prompt) <= last and list(ids[: len(prompt)]) == list(prompt):
            return len(prompt)
        # The template renders earlier turns differently if later turns follow. The generation prompt is then the part
        # of the prompt that follows the earlier messages. The conversation may contain only the beginning of this part,
        # because some generation prompts open the thinking, which the template omits from a finished conversation.
        first = min(last, self._first_change(ids, messages, index, _with_changed_start(messages[index])))
        history = self._try_render(messages[:index], False)
        opening = list(prompt[_shared(prompt, history) :])
        for size in range(len(opening), 0, -1):
            for start in range(first, lowest + size - 1, -1):
                if list(ids[start - size : start]) == opening[:size]:
                    return start
        return first

    def _end(self, ids: Sequence[int], messages: Sequence[Mapping[str, Any]], index: int, last: int) -> int:
        """Return the index after the answer's end token, or after the answer if it has no end token."""
        limit = len(ids)
        if index + 1 < len(messages):
            following = messages[index + 1]
            limit = self._first_change(ids, messages, index + 1, _with_changed_start(following))
        stop = next((place for place in range(last, limit) if ids[place] in self.stop_token_ids), None)
        if stop is not None:
            return stop + 1
        until = self._try_render(messages[: index + 1], False)
        is_prefix = until and list(ids[: len(until)]) == list(until)
        return len(until) if is_prefix else last

    def _first_change(
        self, ids: Sequence[int], messages: Sequence[Mapping[str, Any]], index: int, changed: Mapping[str, Any]
    ) -> int:
        """Return the index of the first token that differs if `messages[index]` is replaced.

        If no token differs, return the number of tokens.
        """
        try:
            return _shared(ids, self._finished([*messages[:index], changed, *messages[index + 1 :]]))
        except TEMPLATE_ERRORS:
            return len(ids)

    def _try_render(self, messages: Sequence[Mapping[str, Any]], prompt: bool) -> Sequence[int]:
        """Return the rendered messages; nothing if the template rejects them."""
        try:
            return self.render(messages, prompt)
        except TEMPLATE_ERRORS:
            return ()


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


def _shared(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    return next(
        (index for index, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )


def _with_changed_start(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose first generated text is changed."""
    if message.get("reasoning_content"):
        return {**message, "reasoning_content": SENTINEL + str(message["reasoning_content"])}
    if message.get("tool_calls") and not message.get("content"):
        first, *others = message["tool_calls"]
        function = {**first["function"], "name": SENTINEL + str(first["function"]["name"])}
        return {**message, "tool_calls": [{**first, "function": function}, *others]}
    return {**message, "content": SENTINEL + str(message.get("content") or "")}


def _with_changed_end(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose last generated text is changed."""
    if message.get("tool_calls"):
        *others, last = message["tool_calls"]
        function = {**last["function"], "name": str(last["function"]["name"]) + SENTINEL}
        return {**message, "tool_calls": [*others, {**last, "function": function}]}
    return {**message, "content": str(message.get("content") or "") + SENTINEL}
