"""OpenAI's completions APIs: requests and answers, also as streams.

A request to the older Completions API has a prompt that is not rendered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from astuner.errors import InvalidRequestError, UnsupportedParameterError, short_repr
from astuner.model_tuner.answers import ChatAnswer, as_message
from astuner.model_tuner.chat_options import OPTION_NAMES, ChatOptions, read_boolean
from astuner.model_tuner.history import RawPrompt
from astuner.schema import Messages, Tools

# These parameters identify or store the request, and do not change an answer.
_WITHOUT_EFFECT = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
)
_PARAMETERS = _WITHOUT_EFFECT | OPTION_NAMES | {"messages", "model", "tools", "stream", "stream_options"}
# Parameters of OpenAI and vLLM, with the values that have no effect.
_NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "logit_bias": ({},),
    "repetition_penalty": (1, 1.0),
    "length_penalty": (1, 1.0),
    "min_p": (0, 0.0),
    "min_tokens": (0,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "modalities": (["text"],),
    "functions": (),
    "function_call": (),
    "reasoning_effort": (),
    "verbosity": (),
    "prediction": (),
    "audio": (),
    "web_search_options": (),
    "chat_template_kwargs": ({},),
}
_ADVICE = {
    "functions": "; use tools",
    "function_call": "; use tool_choice",
    "chat_template_kwargs": "; set them in model.renderer, where the whole run uses them",
}
DecodeToken = Callable[[int], str]
"""Returns the text of one token id."""
# Characters per chunk of a stream.
_CHUNK_CHARS = 24


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request for an assistant turn, whatever API it came through.

    Attributes:
        messages: the conversation, in OpenAI's format.
        tools: OpenAI tool definitions; None if there are none.
        options: the other parameters of `ModelTuner.chat`.
        model: the name of the model; None if the request has none.
        stream: whether the answer is a stream of chunks.
        include_usage: whether the last chunk of a stream contains the usage.
    """

    messages: Messages
    tools: Tools | None = None
    options: ChatOptions = field(default_factory=ChatOptions)
    model: str | None = None
    stream: bool = False
    include_usage: bool = False

    def chat_arguments(self) -> dict[str, Any]:
        """Return the arguments of `ModelTuner.chat`; those that ask for nothing are None.

        The endpoint of a frozen target receives the others. OpenAI's refuses some of them without tools or logprobs.
        """
        options = self.options
        names = ("temperature", "top_p", "top_k", "max_tokens", "seed", "presence_penalty", "frequency_penalty", "n")
        return {
            "messages": self.messages,
            "tools": self.tools,
            **{name: getattr(options, name) for name in names},
            "stop": options.stop or None,
            "logprobs": options.logprobs or None,
            "top_logprobs": options.top_logprobs or None,
            "tool_choice": options.given.get("tool_choice"),
            "parallel_tool_calls": None if options.parallel_tool_calls else False,
            "response_format": None if options.json_schema is None else options.given["response_format"],
        }


def parse_chat_request(body: object) -> ChatRequest:
    """Return the request of a chat-completions body.

    A parameter that is null counts as absent. `user`, `metadata`, `store`, `service_tier`, `safety_identifier` and
    `prompt_cache_key` have no effect on an answer and are accepted. The messages are checked by `ModelTuner.chat`.

    Args:
        body: the JSON object of the request.
    """
    given = given_parameters(body)
    for name, value in given.items():
        if name in _PARAMETERS:
            continue
        if name not in _NEUTRAL_VALUES:
            raise InvalidRequestError(f"unknown parameter {short_repr(name)}; leave it out", str(name))
        if value not in _NEUTRAL_VALUES[name]:
            advice = _ADVICE.get(name, "; leave it out")
            raise UnsupportedParameterError(f"the model in training cannot honour {name}{advice}", name)
    tools = _tools(given)
    options = ChatOptions.parse({name: given[name] for name in given if name in OPTION_NAMES}, tools)
    messages = given.get("messages")
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise InvalidRequestError(
            f"messages must be a list of at least one message, got {short_repr(messages)}", "messages"
        )
    model = given.get("model")
    if model is not None and not isinstance(model, str):
        raise InvalidRequestError(f"model must be a string, got {short_repr(model)}", "model")
    stream = read_boolean(given, "stream", False)
    return ChatRequest(messages, tools, options, model, stream, _include_usage(given, stream))


def given_parameters(body: object) -> dict[str, Any]:
    """Return the parameters of a body that are not null.

    Raises:
        InvalidRequestError: the body is not a JSON object.
    """
    if not isinstance(body, Mapping):
        raise InvalidRequestError(f"the body must be a JSON object, got {short_repr(body)}")
    return {name: value for name, value in body.items() if value is not None}


def read_text(item: Mapping[str, Any], name: str, where: str) -> str:
    """Return the text in an item's field `name`; `where` is the item's place in the body.

    Raises:
        InvalidRequestError: it is not a text.
    """
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidRequestError(f"{where}.{name} must be a string, got {short_repr(value)}", f"{where}.{name}")
    return value


def _tools(given: Mapping[str, Any]) -> Sequence[Mapping[str, Any]] | None:
    tools = given.get("tools")
    if tools is None:
        return None
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise InvalidRequestError(f"tools must be a list, got {short_repr(tools)}", "tools")
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping) or not isinstance(tool.get("type"), str):
            raise InvalidRequestError(f"tools[{index}] must be an object with a type, got {short_repr(tool)}", "tools")
        if tool["type"] != "function":
            raise UnsupportedParameterError(
                f"tools[{index}] has the type {short_repr(tool['type'])}; the model in training has only tools of "
                "the type 'function'",
                "tools",
            )
        function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise InvalidRequestError(f"tools[{index}].function needs a name, got {short_repr(function)}", "tools")
        if not isinstance(function.get("parameters") or {}, Mapping):
            raise InvalidRequestError(f"tools[{index}].function.parameters must be a JSON schema", "tools")
    return tools or None


def _include_usage(given: Mapping[str, Any], stream: bool) -> bool:
    options = given.get("stream_options", {})
    if not isinstance(options, Mapping):
        raise InvalidRequestError(f"stream_options must be an object, got {short_repr(options)}", "stream_options")
    if options and not stream:
        raise InvalidRequestError("stream_options needs stream: true", "stream_options")
    if unknown := sorted(options.keys() - {"include_usage", "include_obfuscation"}):
        raise InvalidRequestError(f"stream_options has the unknown option {short_repr(unknown[0])}", "stream_options")
    return read_boolean(options, "include_usage", False)


def to_chat_completion(
    answers: Sequence[ChatAnswer], request: ChatRequest, model: str, decode_token: DecodeToken
) -> dict[str, Any]:
    """Return answers as a `chat.completion`.

    Args:
        answers: the choices, in order; at least one.
        decode_token: returns the text of a token, for logprobs.
    """
    choices = []
    for index, answer in enumerate(answers):
        message = as_message(answer.parsed) | {"refusal": None}
        if answer.parsed.tool_calls and not answer.parsed.content:
            message["content"] = None
        logprobs = to_logprobs(answer, decode_token) if request.options.logprobs else None
        choices.append(
            {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason(answer)}
        )
    return {**to_head(answers, model, "chat.completion"), "choices": choices, "usage": to_usage(answers)}


def to_chunks(
    answers: Sequence[ChatAnswer], request: ChatRequest, model: str, decode_token: DecodeToken
) -> Iterator[tuple[None, dict[str, Any]]]:
    """Yield the events of a stream, whose data are `chat.completion.chunk`s (see `to_chat_completion`)."""
    head = to_head(answers, model, "chat.completion.chunk")
    if request.include_usage:
        head["usage"] = None

    def chunk(
        index: int, delta: dict[str, Any], reason: str | None = None, logprobs: object = None
    ) -> tuple[None, dict[str, Any]]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return None, {**head, "choices": [choice]}

    for index, answer in enumerate(answers):
        # A text's piece need not consist of whole tokens, so all logprobs come with the first chunk.
        logprobs = to_logprobs(answer, decode_token) if request.options.logprobs else None
        yield chunk(index, {"role": "assistant", "content": "", "refusal": None}, logprobs=logprobs)
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
        yield None, {**head, "choices": [], "usage": to_usage(answers)}


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


def to_head(answers: Sequence[ChatAnswer], model: str, kind: str, prefix: str = "chatcmpl") -> dict[str, Any]:
    """Return the fields that all objects of a response have; `prefix` begins the id."""
    call = answers[0].call
    created = int(call.end_time or time.time())
    return {"id": f"{prefix}-{call.call_id}", "object": kind, "created": created, "model": model}


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


_MAX_LOGPROBS = 5
# OpenAI's default.
_MAX_TOKENS = 16
_CHAT_PARAMETERS = ("messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "top_logprobs")


def parse_completion_request(body: object) -> ChatRequest:
    """Return the request of a completions body. Its prompt is not rendered with the chat template."""
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
    """Return answers as a `text_completion`; for the arguments, see `to_chat_completion`."""
    choices = [
        _choice(index, answer.parsed.content, finish_reason(answer))
        | {"logprobs": _logprobs(answer, decode_token) if request.options.logprobs else None}
        for index, answer in enumerate(answers)
    ]
    return {**to_head(answers, model, "text_completion", "cmpl"), "choices": choices, "usage": to_usage(answers)}


def to_text_events(
    answers: Sequence[ChatAnswer], request: ChatRequest, model: str, decode_token: DecodeToken
) -> Iterator[tuple[None, dict[str, Any]]]:
    """Yield a stream's events; for the arguments, see `to_chat_completion`."""
    head = to_head(answers, model, "text_completion", "cmpl")
    for index, answer in enumerate(answers):
        logprobs = {"logprobs": _logprobs(answer, decode_token)} if request.options.logprobs else {}
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
