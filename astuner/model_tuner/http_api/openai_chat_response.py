"""Answers in OpenAI's chat-completions format: completions, and chunks of a stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from astuner.model_tuner.answers import ChatAnswer, as_message
from astuner.model_tuner.http_api.openai_chat_request import ChatRequest

DecodeToken = Callable[[int], str]
"""Returns the text of one token id."""

# Characters per chunk of a stream.
_CHUNK_CHARS = 24


def to_chat_completion(
    answers: Sequence[ChatAnswer], request: ChatRequest, model: str, decode_token: DecodeToken
) -> dict[str, Any]:
    """Return answers as a `chat.completion`.

    Args:
        answers: the choices, in order; at least one.
        request: the request.
        model: the name of the model.
        decode_token: returns the text of a token, for logprobs.
    """
    choices = []
    for index, answer in enumerate(answers):
        message = as_message(answer.parsed) | {"refusal": None}
        if answer.parsed.tool_calls and not answer.parsed.content:
            message["content"] = None
        logprobs = to_logprobs(answer, decode_token) if request.logprobs else None
        choices.append(
            {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason(answer)}
        )
    return {**_head(answers, model, "chat.completion"), "choices": choices, "usage": to_usage(answers)}


def to_chunks(
    answers: Sequence[ChatAnswer], request: ChatRequest, model: str, decode_token: DecodeToken
) -> Iterator[dict[str, Any]]:
    """Yield the `chat.completion.chunk`s of answers; the arguments are those of `to_chat_completion`."""
    head = _head(answers, model, "chat.completion.chunk")
    if request.include_usage:
        head["usage"] = None

    def chunk(index: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        return {**head, "choices": [choice]}

    for index, answer in enumerate(answers):
        first = chunk(index, {"role": "assistant", "content": "", "refusal": None})
        if request.logprobs:
            # A piece of text need not consist of whole tokens, so all logprobs come with the first chunk.
            first["choices"][0]["logprobs"] = to_logprobs(answer, decode_token)
        yield first
        for piece in pieces(answer.parsed.reasoning or ""):
            yield chunk(index, {"reasoning_content": piece})
        for piece in pieces(answer.parsed.content):
            yield chunk(index, {"content": piece})
        for position, call in enumerate(as_message(answer.parsed).get("tool_calls", ())):
            function = {"name": call["function"]["name"], "arguments": ""}
            yield chunk(index, {"tool_calls": [{**call, "index": position, "function": function}]})
            for piece in pieces(call["function"]["arguments"]):
                yield chunk(index, {"tool_calls": [{"index": position, "function": {"arguments": piece}}]})
        yield chunk(index, {}, finish_reason(answer))
    if request.include_usage:
        yield {**head, "choices": [], "usage": to_usage(answers)}


def finish_reason(answer: ChatAnswer) -> str:
    """Return why an answer ended: `stop`, `length` or `tool_calls`."""
    if answer.call.finish_reason == "length":
        return "length"
    return "tool_calls" if answer.parsed.tool_calls else "stop"


def to_usage(answers: Sequence[ChatAnswer]) -> dict[str, int]:
    """Return the token counts of the answers to one request."""
    prompt = answers[0].token_counts[0]
    completion = sum(answer.token_counts[1] for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def pieces(text: str) -> Iterator[str]:
    """Yield a text in the pieces in which a stream sends it."""
    for start in range(0, len(text), _CHUNK_CHARS):
        yield text[start : start + _CHUNK_CHARS]


def _head(answers: Sequence[ChatAnswer], model: str, kind: str) -> dict[str, Any]:
    call = answers[0].call
    return {
        "id": f"chatcmpl-{call.call_id}",
        "object": kind,
        "created": int(call.end_time or time.time()),
        "model": model,
    }


def to_logprobs(answer: ChatAnswer, decode_token: DecodeToken) -> dict[str, Any]:
    """Return an answer's logprobs, without those for its end token or stop string."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = decode_token(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    call, end = answer.call, answer.text_tokens
    tops = answer.top_logprobs[:end] or ((),) * end
    content = [
        entry(token, logprob) | {"top_logprobs": [entry(*pair) for pair in top]}
        for token, logprob, top in zip(call.completion_ids[:end], call.logprobs[:end], tops, strict=True)
    ]
    return {"content": content, "refusal": None}
