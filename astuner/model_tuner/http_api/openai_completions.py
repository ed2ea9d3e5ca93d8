"""OpenAI's Completions API: requests with a prompt that is not rendered, answers and streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from astuner.errors import InvalidRequestError, UnsupportedParameterError, short_repr
from astuner.model_tuner.answers import ChatAnswer
from astuner.model_tuner.history import RawPrompt
from astuner.model_tuner.http_api.openai_chat_request import ChatRequest, given_parameters, parse_chat_request
from astuner.model_tuner.http_api.openai_chat_response import DecodeToken, finish_reason, pieces, to_logprobs, to_usage

_MAX_LOGPROBS = 5
# OpenAI's default.
_MAX_TOKENS = 16
_CHAT_PARAMETERS = ("messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "top_logprobs")


def parse_completion_request(body: object) -> ChatRequest:
    """Return the request of a completions body. Its prompt is not rendered with the chat template.

    Raises:
        InvalidRequestError: a parameter is missing or invalid.
        UnsupportedParameterError: a parameter cannot be honoured, such as several prompts.
    """
    given = given_parameters(body)
    for name in _CHAT_PARAMETERS:
        if name in given:
            raise InvalidRequestError(f"completions have no parameter {name}; use chat completions", name)
    prompt = _prompt(given.pop("prompt", None))
    count = given.pop("logprobs", None)
    if count is not None:
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= _MAX_LOGPROBS:
            raise InvalidRequestError(
                f"logprobs must be an integer from 0 to {_MAX_LOGPROBS}, got {short_repr(count)}", "logprobs"
            )
        given |= {"logprobs": True, "top_logprobs": count}
    request = parse_chat_request({"max_tokens": _MAX_TOKENS, **given, "messages": prompt})
    return replace(request, messages=prompt)


def to_text_completion(
    answers: Sequence[ChatAnswer], request: ChatRequest, model: str, decode_token: DecodeToken
) -> dict[str, Any]:
    """Return answers as a `text_completion`; the arguments are those of `to_chat_completion`."""
    choices = [
        _choice(index, answer.parsed.content, finish_reason(answer))
        | {"logprobs": _logprobs(answer, decode_token) if request.logprobs else None}
        for index, answer in enumerate(answers)
    ]
    return {**_head(answers, model), "choices": choices, "usage": to_usage(answers)}


def to_text_events(
    answers: Sequence[ChatAnswer], request: ChatRequest, model: str, decode_token: DecodeToken
) -> Iterator[tuple[None, dict[str, Any]]]:
    """Yield the events in a stream of answers; the arguments are those of `to_chat_completion`."""
    head = _head(answers, model)
    for index, answer in enumerate(answers):
        logprobs = {"logprobs": _logprobs(answer, decode_token)} if request.logprobs else {}
        for piece in pieces(answer.parsed.content):
            yield None, {**head, "choices": [_choice(index, piece, None)]}
        yield None, {**head, "choices": [_choice(index, "", finish_reason(answer)) | logprobs]}
    if request.include_usage:
        yield None, {**head, "choices": [], "usage": to_usage(answers)}


def _prompt(prompt: object) -> RawPrompt:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        if not prompt.isascii() and any("\ud800" <= character <= "\udfff" for character in prompt):
            raise InvalidRequestError("prompt contains half of a surrogate pair, which is not a character", "prompt")
        return RawPrompt(prompt)
    if not isinstance(prompt, list) or not prompt:
        raise InvalidRequestError(f"prompt must be a text or a list of token ids, got {short_repr(prompt)}", "prompt")
    if all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in prompt):
        return RawPrompt(tuple(prompt))
    if all(isinstance(part, str | list) for part in prompt):
        raise UnsupportedParameterError(f"prompt has {len(prompt)} prompts; expected one prompt per request", "prompt")
    raise InvalidRequestError(f"prompt must be a text or a list of token ids, got {short_repr(prompt)}", "prompt")


def _head(answers: Sequence[ChatAnswer], model: str) -> dict[str, Any]:
    call = answers[0].call
    return {"id": f"cmpl-{call.call_id}", "object": "text_completion", "created": int(call.end_time), "model": model}


def _choice(index: int, text: str, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}


def _logprobs(answer: ChatAnswer, decode_token: DecodeToken) -> dict[str, Any]:
    entries = to_logprobs(answer, decode_token)["content"]
    tokens = [entry["token"] for entry in entries]
    offsets = [sum(map(len, tokens[:index])) for index in range(len(tokens))]
    return {
        "tokens": tokens,
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [{top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in entries],
        "text_offset": offsets,
    }
