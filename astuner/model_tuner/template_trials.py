"""Bridging and transcripts for chat templates that `renderers` does not support, by trial renderings.

A conversation's trial rendering shows whether the template keeps the tokens of earlier turns, and if so, what it
writes after an answer. Trial renderings with a changed message show where the text of the message begins and ends. The
text before an answer is its prompt, as the template renders it with `add_generation_prompt`. The text after the answer
is its end token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from jinja2 import TemplateError

from astuner.schema import Messages

# Errors that templates and `renderers` raise for messages that they do not support.
TEMPLATE_ERRORS = (TemplateError, ValueError, TypeError, LookupError)

# Placeholders for the texts of an answer and a new message in trial renderings. They consist of letters and digits,
# so that no template trims or escapes them.
_SENTINEL = "Qx7vZk29LmW3"
_NEW_SENTINEL = "Jr5dTy81PcH6"
# A text shares its first character with at most one sentinel, so that one of two trial renderings differs there.
_SENTINELS = (_SENTINEL, "x" + _SENTINEL)
_EMPTY_THINKING = re.compile(r"<think>\s*</think>\s*")


@dataclass(frozen=True, slots=True)
class TemplateBridge:
    """Determines the tokens that an opaque template writes after an answer.

    Attributes:
        render: maps messages, and whether to add the generation prompt, to token ids.
        decode: maps token ids to text.
    """

    render: Callable[[Messages, bool], Sequence[int]]
    decode: Callable[[Sequence[int]], str]

    def closing(
        self, messages: Messages, n_covered: int, stop_token_ids: Collection[int], *, keep_thinking: bool
    ) -> tuple[int, ...] | None:
        """Return the ids from the end token of the answer `messages[n_covered - 1]` on.

        The answer's text is replaced by a placeholder. The earlier tokens are kept if the template then writes, before
        the placeholder, exactly the prompt that the answer was sampled for and the rest of the answer (thinking, text
        next to tool calls), and after it only white space up to an end token (after a tool call, nothing that depends
        on the new messages). With `keep_thinking`, the template may write anything before the placeholder: the earlier
        tokens are kept although the template drops thinking.
        The tokens after the end token then do not depend on the wording of the answer. Cutting the ids at a special
        token, instead of cutting the text, preserves how the template tokenises the new messages.

        Returns:
            The ids; None if the earlier tokens are not kept, or the template rejects a part of the conversation.
        """
        try:
            prompt = self.decode(self.render(messages[: n_covered - 1], True))
            for answer, texts in _trials(messages[n_covered - 1]):
                trial = [*messages[: n_covered - 1], answer, *messages[n_covered:]]
                ids = self.render(trial, True)
                end = self._end(ids, stop_token_ids)
                if end is None:
                    continue
                before, _, after = self.decode(ids[:end]).partition(_SENTINEL)
                rest = before[len(prompt) :]
                has_texts = all(text in rest for text in texts) if texts else not rest.strip()
                is_kept = keep_thinking or (before.startswith(prompt) and has_texts)
                if is_kept and (not after.strip() or self._precedes_new_text(ids[: end + 1], trial, n_covered)):
                    return tuple(ids[end:])
                if self._renders_reasoning(messages[:n_covered]):
                    return None
        except TEMPLATE_ERRORS:
            return None
        return None

    def end_token(self, special_token_ids: Collection[int]) -> int | None:
        """Return the special token with which the template ends an answer; None if it has none."""
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": _SENTINEL}]
        try:
            ids = self.render(messages, False)
            end = self._end(ids, special_token_ids)
            return None if end is None or self.decode(ids[:end]).partition(_SENTINEL)[2].strip() else ids[end]
        except TEMPLATE_ERRORS:
            return None

    def _precedes_new_text(self, ids: Sequence[int], messages: Messages, n_covered: int) -> bool:
        """Return whether `ids` end a turn with tool calls, and do not depend on the text of the first new message."""
        if not messages[n_covered - 1].get("tool_calls"):
            return False
        other = {**messages[n_covered], "content": _NEW_SENTINEL}
        other_ids = self.render([*messages[:n_covered], other, *messages[n_covered + 1 :]], True)
        return list(other_ids[: len(ids)]) == list(ids)

    def _renders_reasoning(self, messages: Messages) -> bool:
        """Return whether the template renders the `reasoning_content` of the last message, an answer."""
        reasoning = str(messages[-1].get("reasoning_content", "")).strip()
        try:
            return bool(reasoning) and reasoning in self.decode(self.render(messages, False))
        except TEMPLATE_ERRORS:
            return False

    def _end(self, ids: Sequence[int], ends: Collection[int]) -> int | None:
        """Return the index of the first `ends` id after the sentinel; None unless the sentinel occurs exactly once."""
        if self.decode(ids).count(_SENTINEL) != 1:
            return None
        start = 0
        for index, token in enumerate(ids):
            if token in ends:
                if _SENTINEL in self.decode(ids[start:index]):
                    return index
                start = index + 1
        return None


def _trials(answer: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Yield variants of the answer that contain the sentinel, each with the texts that the template must keep.

    Thinking is first passed as `reasoning_content`, then in the text, for templates that do not use that field.
    """
    calls = answer.get("tool_calls")
    text = str(answer["content"]) if calls else _SENTINEL
    trial = {**answer, "content": text}
    if calls:
        function = {**calls[-1]["function"], "arguments": json.dumps({"value": _SENTINEL})}
        trial["tool_calls"] = [*calls[:-1], {**calls[-1], "function": function}]
    texts = [text.strip()] if calls else []
    reasoning = str(trial.pop("reasoning_content", "")).strip()
    if not reasoning:
        yield trial, texts
        return
    yield {**trial, "reasoning_content": reasoning}, [*texts, reasoning]
    yield {**trial, "content": f"<think>\n{reasoning}\n</think>\n\n{text}"}, [*texts, reasoning]


@dataclass(frozen=True, slots=True)
class TemplateAnswers:
    """Finds the answers of a conversation in its rendered text.

    Attributes:
        render: maps messages, and whether to add the generation prompt, to text.
        ends: the texts of the tokens that end an answer.
    """

    render: Callable[[Messages, bool], str]
    ends: Collection[str]

    def tokens(
        self, messages: Messages, encode: Callable[[str], list[int]], decode: Callable[[Sequence[int]], str]
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

    def _find(self, messages: Messages) -> tuple[str, list[tuple[int, int, bool]]]:
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

    def _finished(self, messages: Messages) -> str:
        """Return the text of a conversation.

        Some templates reject a conversation that ends with an answer, unless they add a generation prompt.
        """
        try:
            return self.render(messages, False)
        except TEMPLATE_ERRORS:
            return self.render(messages, True)

    def _start(self, text: str, messages: Messages, index: int, last: int, lowest: int) -> int:
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

    def _end(self, text: str, messages: Messages, index: int, last: int) -> int:
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
        self, text: str, messages: Messages, index: int, change: Callable[[Mapping[str, Any], str], Mapping[str, Any]]
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

    def _try_render(self, messages: Messages, prompt: bool) -> str:
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
