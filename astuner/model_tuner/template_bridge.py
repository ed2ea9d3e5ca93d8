"""What an unknown chat template writes after an answer, once its renderings prove that it keeps what came before."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

# What templates, and `renderers`, raise at messages that they do not take.
REFUSALS = (TemplateError, ValueError, TypeError, LookupError)

# These stand for an answer's text, and for a new message's, in trial renderings: letters and digits only, so that no
# template trims or escapes them.
_SENTINEL = "Qx7vZk29LmW3"
_NEW_SENTINEL = "Jr5dTy81PcH6"


@dataclass(frozen=True, slots=True)
class TemplateBridge:
    """Reads off an opaque template how it goes on after an answer.

    Attributes:
        render: messages and whether an answer is to follow, to token ids.
        decode: token ids to text.
    """

    render: Callable[[Sequence[Mapping[str, Any]], bool], Sequence[int]]
    decode: Callable[[Sequence[int]], str]

    def closing(
        self, messages: Sequence[Mapping[str, Any]], known: int, stop_token_ids: Collection[int]
    ) -> tuple[int, ...] | None:
        """Return the ids from the end token of the answer `messages[known - 1]` on.

        The proof: with the answer's text replaced by one that occurs nowhere else, the template writes before it
        exactly the prompt that the answer was sampled for, and the rest of what was said (thinking, text beside
        tool calls), and after it nothing but white space up to an end token (or, after a tool call, nothing that
        depends on what is new).
        What follows that token can then not depend on how the answer was spelled. Cutting the ids at a special
        token, rather than the text, keeps the template's own tokenisation of what is new.

        Returns:
            None where that does not hold, or the template does not take a part of the conversation by itself.
        """
        try:
            question = self.decode(self.render(messages[: known - 1], True))
            for answer, said in _trials(messages[known - 1]):
                told = [*messages[: known - 1], answer, *messages[known:]]
                ids = self.render(told, True)
                end = self._end(ids, stop_token_ids)
                if end is None:
                    continue
                before, _, after = self.decode(ids[:end]).partition(_SENTINEL)
                kept = before.startswith(question) and _is_kept(before[len(question) :], said)
                if kept and (not after.strip() or self._stands_before_new(ids[: end + 1], told, known)):
                    return tuple(ids[end:])
                if self._shows_thinking(messages[:known]):
                    return None
        except REFUSALS:
            return None
        return None

    def end_token(self, special_token_ids: Collection[int]) -> int | None:
        """Return the special token with which the template ends an answer, None where it shows none."""
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": _SENTINEL}]
        try:
            ids = self.render(messages, False)
            end = self._end(ids, special_token_ids)
            return None if end is None or self.decode(ids[:end]).partition(_SENTINEL)[2].strip() else ids[end]
        except REFUSALS:
            return None

    def _stands_before_new(self, ids: Sequence[int], told: Sequence[Mapping[str, Any]], known: int) -> bool:
        """Whether `ids` end a turn that calls tools, and so are the same whatever the first new message says."""
        if not told[known - 1].get("tool_calls"):
            return False
        other = {**told[known], "content": _NEW_SENTINEL}
        trial = self.render([*told[:known], other, *told[known + 1 :]], True)
        return list(trial[: len(ids)]) == list(ids)

    def _shows_thinking(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the template writes the thinking of an answer that is the last message, out of its own field."""
        reasoning = str(messages[-1].get("reasoning_content", "")).strip()
        try:
            return bool(reasoning) and reasoning in self.decode(self.render(messages, False))
        except REFUSALS:
            return False

    def _end(self, ids: Sequence[int], ends: Collection[int]) -> int | None:
        """Return the place of the first of `ends` after the sentinel, which must be there once."""
        if self.decode(ids).count(_SENTINEL) != 1:
            return None
        start = 0
        for place, token in enumerate(ids):
            if token in ends:
                if _SENTINEL in self.decode(ids[start:place]):
                    return place
                start = place + 1
        return None


def _trials(answer: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Yield the answer with the sentinel in it, and the texts of it that the template must keep.

    Thinking is given in a field of its own, then in the text, where a template that knows no such field may keep it.
    """
    calls = answer.get("tool_calls")
    text = str(answer["content"]) if calls else _SENTINEL
    trial = {**answer, "content": text}
    if calls:
        function = {**calls[-1]["function"], "arguments": json.dumps({"value": _SENTINEL})}
        trial["tool_calls"] = [*calls[:-1], {**calls[-1], "function": function}]
    said = [text.strip()] if calls else []
    reasoning = str(trial.pop("reasoning_content", "")).strip()
    if not reasoning:
        yield trial, said
        return
    yield {**trial, "reasoning_content": reasoning}, [*said, reasoning]
    yield {**trial, "content": f"<think>\n{reasoning}\n</think>\n\n{text}"}, [*said, reasoning]


def _is_kept(rendered: str, said: Sequence[str]) -> bool:
    """Whether `rendered`, what stands between the prompt and the sentinel, holds what was said and nothing foreign."""
    if not said:
        return not rendered.strip()
    return all(text in rendered for text in said)
