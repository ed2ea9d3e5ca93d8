"""Answers of the model: their text up to a stop string, and their form as messages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from astuner.llm_engine.stop_strings import StopStrings
from astuner.model_tuner.codec import ParsedAnswer, ToolCall
from astuner.schema import Completion, LlmCall, SamplingParams

T = TypeVar("T")


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
        text_tokens: the number of sampled tokens before the stop string or the end token.
        usage: the numbers of prompt and completion tokens that the endpoint of a frozen target reports; empty if it
            reports none, and for the model in training.
    """

    parsed: ParsedAnswer
    call: LlmCall
    stop_string: str | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    alternatives: tuple[ChatAnswer, ...] = ()
    text_tokens: int = 0
    usage: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """The text of the answer, without thinking and without tool calls that could be parsed."""
        return self.parsed.content

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The well-formed tool calls, each with `id`, `name` and `arguments`."""
        return self.parsed.tool_calls

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message in OpenAI's format, to append to the messages of the next request."""
        return as_message(self.parsed)

    @property
    def token_counts(self) -> tuple[int, int]:
        """The numbers of prompt and completion tokens."""
        prompt, completion = self.usage or (len(self.call.prompt_ids), len(self.call.completion_ids))
        return prompt, completion


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


@dataclass(frozen=True, slots=True)
class CutCompletion:
    """A completion up to a stop string.

    Attributes:
        completion: the completion up to the token that completes the string.
        text_ids: token ids to parse: those of the text before the string, or the whole completion if there is none.
        text_tokens: the number of sampled tokens before the string or the end token.
        stop_string: the string; None if the completion has none.
    """

    completion: Completion
    text_ids: tuple[int, ...]
    text_tokens: int
    stop_string: str | None = None


def cut_at_stop(
    completion: Completion, params: SamplingParams, end_ids: Sequence[int], tokenizer: Any
) -> CutCompletion:
    """Cut a completion after the token that completes a stop string.

    Engines that stop at strings return nothing beyond that token. For the others, the tokens after it are dropped,
    which changes neither the kept tokens nor their probabilities.

    Args:
        completion: the completion.
        params: the parameters that it was sampled with.
        end_ids: the end tokens of the model's answers.
        tokenizer: the model's tokenizer.
    """
    ids = completion.token_ids
    stops = StopStrings(params.stop, tokenizer) if params.stop else None
    end = stops.first_end(ids) if stops else None
    before = stops.before(ids[:end]) if stops and end is not None else None
    if before is None:
        return CutCompletion(completion, ids, len(ids) - (bool(ids) and ids[-1] in end_ids))
    completion = replace(
        completion,
        token_ids=ids[:end],
        logprobs=completion.logprobs[:end],
        top_logprobs=completion.top_logprobs[:end],
        sampler_logprobs=completion.sampler_logprobs[:end],
        finish_reason="stop",
    )
    text_tokens, text_ids, string = before
    return CutCompletion(completion, text_ids, text_tokens, string)


async def gather_answers(requests: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of concurrent requests; if one of them fails, cancel the others and raise its error."""
    if len(requests) == 1:
        return [await requests[0]]
    tasks = [asyncio.ensure_future(request) for request in requests]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
