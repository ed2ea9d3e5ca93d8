"""Bridging for chat templates that `renderers` does not support.

Trial renderings of a conversation show whether the template keeps the tokens of earlier turns, and if so, what it
writes after an answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

# Errors that templates and `renderers` raise for messages that they do not support.
TEMPLATE_ERRORS = (TemplateError, ValueError, TypeError, LookupError)

# Placeholders for the text of an answer and of a new message in trial renderings. They consist of letters and digits,
# so that no template trims or escapes them.
SENTINEL = "Qx7vZk29LmW3"
_NEW_SENTINEL = "Jr5dTy81PcH6"


@dataclass(frozen=True, slots=True)
class TemplateBridge:
    """Determines the tokens that an opaque template writes after an answer.

    Attributes:
        render: maps messages, and whether to add the generation prompt, to token ids.
        decode: maps token ids to text.
    """

    render: Callable[[Sequence[Mapping[str, Any]], bool], Sequence[int]]
    decode: Callable[[Sequence[int]], str]

    def closing(
        self,
        messages: Sequence[Mapping[str, Any]],
        n_covered: int,
        stop_token_ids: Collection[int],
        *,
        keep_thinking: bool,
    ) -> tuple[int, ...] | None:
        """Return the ids from the end token of the answer `messages[n_covered - 1]` on.

        The answer's text is replaced by a placeholder. The earlier tokens are kept if the template then writes, before
        the placeholder, exactly the prompt that the answer was sampled for and the rest of the answer (thinking, text
        next to tool calls), and after it only white space up to an end token (after a tool call, nothing that depends
        on the new messages). With `keep_thinking`, the template may write anything before the placeholder: the earlier
        tokens are kept although the template drops thinking.
        The tokens after the end token then do not depend on the wording of the answer. Cutting the ids at a special
        token, instead of cutting the text, preserves the template's tokenisation of the new messages.

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
                before, _, after = self.decode(ids[:end]).partition(SENTINEL)
                is_kept = keep_thinking or (before.startswith(prompt) and _contains_all(before[len(prompt) :], texts))
                if is_kept and (not after.strip() or self._precedes_new_text(ids[: end + 1], trial, n_covered)):
                    return tuple(ids[end:])
                if self._renders_reasoning(messages[:n_covered]):
                    return None
        except TEMPLATE_ERRORS:
            return None
        return None

    def end_token(self, special_token_ids: Collection[int]) -> int | None:
        """Return the special token with which the template ends an answer; None if it has none."""
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": SENTINEL}]
        try:
            ids = self.render(messages, False)
            end = self._end(ids, special_token_ids)
            return None if end is None or self.decode(ids[:end]).partition(SENTINEL)[2].strip() else ids[end]
        except TEMPLATE_ERRORS:
            return None

    def _precedes_new_text(self, ids: Sequence[int], messages: Sequence[Mapping[str, Any]], n_covered: int) -> bool:
        """Return whether `ids` end a turn with tool calls, and do not depend on the text of the first new message."""
        if not messages[n_covered - 1].get("tool_calls"):
            return False
        other = {**messages[n_covered], "content": _NEW_SENTINEL}
        other_ids = self.render([*messages[:n_covered], other, *messages[n_covered + 1 :]], True)
        return list(other_ids[: len(ids)]) == list(ids)

    def _renders_reasoning(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether the template renders the `reasoning_content` of the last message, an answer."""
        reasoning = str(messages[-1].get("reasoning_content", "")).strip()
        try:
            return bool(reasoning) and reasoning in self.decode(self.render(messages, False))
        except TEMPLATE_ERRORS:
            return False

    def _end(self, ids: Sequence[int], ends: Collection[int]) -> int | None:
        """Return the index of the first `ends` id after the sentinel; None unless the sentinel occurs exactly once."""
        if self.decode(ids).count(SENTINEL) != 1:
            return None
        start = 0
        for index, token in enumerate(ids):
            if token in ends:
                if SENTINEL in self.decode(ids[start:index]):
                    return index
                start = index + 1
        return None


def _trials(answer: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Yield variants of the answer that contain the sentinel, each with the texts that the template must keep.

    Thinking is first passed as `reasoning_content`, then in the text, for templates that do not use that field.
    """
    calls = answer.get("tool_calls")
    text = str(answer["content"]) if calls else SENTINEL
    trial = {**answer, "content": text}
    if calls:
        function = {**calls[-1]["function"], "arguments": json.dumps({"value": SENTINEL})}
        trial["tool_calls"] = [*calls[:-1], {**calls[-1], "function": function}]
    texts = [text.strip()] if calls else []
    reasoning = str(trial.pop("reasoning_content", "")).strip()
    if not reasoning:
        yield trial, texts
        return
    yield {**trial, "reasoning_content": reasoning}, [*texts, reasoning]
    yield {**trial, "content": f"<think>\n{reasoning}\n</think>\n\n{text}"}, [*texts, reasoning]


def _contains_all(rendered: str, texts: Sequence[str]) -> bool:
    """Return whether `rendered` contains all `texts`; without texts, whether it is blank."""
    if not texts:
        return not rendered.strip()
    return all(text in rendered for text in texts)
