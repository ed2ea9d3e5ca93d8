"""Answers of the model: their text up to a stop string, and their form as messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from astuner.llm_engine.stop_strings import StopStrings
from astuner.model_tuner.codec import ParsedAnswer
from astuner.schema import Completion, LlmCall


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """A parsed answer and the recorded call that produced it.

    Attributes:
        parsed: the answer; if a stop string ended it, without the string and what follows.
        call: the call, with all sampled tokens.
        stop_string: the stop string that ended the answer; None if it ended in another way.
        top_logprobs: for each sampled token, the ids and logprobs of the most likely tokens at its position; empty
            unless requested.
        alternatives: the other answers of a request with `n` above 1.
    """

    parsed: ParsedAnswer
    call: LlmCall
    stop_string: str | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    alternatives: tuple[ChatAnswer, ...] = ()


def as_message(parsed: ParsedAnswer) -> dict[str, Any]:
    """Return an answer as a message in OpenAI's format."""
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(dict(call.arguments), ensure_ascii=False),
                },
            }
            for call in parsed.tool_calls
        ]
    return message


def cut_at_stop(
    completion: Completion, stop: Sequence[str], tokenizer: Any
) -> tuple[Completion, tuple[int, ...], str | None]:
    """Cut a completion after the token that completes a stop string.

    Engines that stop at strings return nothing beyond that token. For the others, the tokens after it are dropped,
    which changes neither the kept tokens nor their probabilities.

    Returns:
        The completion; token ids of its text before the string, for parsing; and the string, or None if there is none.
    """
    if not stop:
        return completion, completion.token_ids, None
    stops = StopStrings(stop, tokenizer)
    end = stops.first_end(completion.token_ids)
    if end is None:
        return completion, completion.token_ids, None
    completion = replace(
        completion,
        token_ids=completion.token_ids[:end],
        logprobs=completion.logprobs[:end],
        top_logprobs=completion.top_logprobs[:end],
        finish_reason="stop",
    )
    visible, string = stops.before(completion.token_ids) or (completion.token_ids, None)
    return completion, visible, string
