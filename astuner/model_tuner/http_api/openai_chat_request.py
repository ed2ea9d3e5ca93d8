"""Requests in OpenAI's chat-completions format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from astuner.errors import InvalidRequestError, UnsupportedParameterError, short_repr

_MAX_CHOICES = 128
_MAX_STOPS = 4
_MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request for an assistant turn, whatever API it came through.

    Attributes:
        messages: the conversation, in OpenAI's format.
        model: the name of the model; None if the request has none.
        tools: OpenAI tool definitions; None if there are none.
        tool_choice: `auto`, `none`, `required`, or the name of a function in OpenAI's format; None for the default.
        sampling: the sampling parameters of the request, without those that it leaves out: `temperature`, `top_p`,
            `top_k`, `max_tokens`, `stop` (a tuple of strings), `seed`, `presence_penalty`, `frequency_penalty`.
        n: the number of answers.
        logprobs: whether the answer contains the logprobs of its tokens.
        top_logprobs: the number of alternatives of each token.
        parallel_tool_calls: False if an answer may have one tool call only.
        response_format: a JSON object or a JSON schema that the answer must match, in OpenAI's format; None for text.
        stream: whether the answer is a stream of chunks.
        include_usage: whether the last chunk of a stream contains the usage.
    """

    messages: Sequence[Mapping[str, Any]]
    model: str | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: str | Mapping[str, Any] | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1
    logprobs: bool = False
    top_logprobs: int = 0
    parallel_tool_calls: bool = True
    response_format: Mapping[str, Any] | None = None
    stream: bool = False
    include_usage: bool = False

    def chat_arguments(self) -> dict[str, Any]:
        """Return the arguments of `ModelTuner.chat`; those that ask for nothing are None.

        The endpoint of a frozen target receives the others. OpenAI's refuses some of them without tools or logprobs.
        """
        return {
            "messages": self.messages,
            "tools": self.tools,
            "tool_choice": self.tool_choice,
            "n": self.n,
            "logprobs": self.logprobs or None,
            "top_logprobs": self.top_logprobs or None,
            "parallel_tool_calls": None if self.parallel_tool_calls else False,
            "response_format": self.response_format,
            **self.sampling,
        }


def parse_chat_request(body: object) -> ChatRequest:
    """Return the request of a chat-completions body.

    A parameter that is null counts as absent. `user`, `metadata`, `store`, `service_tier`, `safety_identifier` and
    `prompt_cache_key` have no effect on an answer and are accepted. The messages are checked by `ModelTuner.chat`.

    Args:
        body: the JSON object of the request.

    Raises:
        InvalidRequestError: a parameter is missing or invalid.
        UnsupportedParameterError: a parameter cannot be honoured.
    """
    given = given_parameters(body)
    _check_names(given)
    sampling = sampling_parameters(given)
    tools = _tools(given)
    logprobs = read_boolean(given, "logprobs", False)
    top_logprobs = read_top_logprobs(given, logprobs)
    messages = given.get("messages")
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise InvalidRequestError(
            f"messages must be a list of at least one message, got {short_repr(messages)}", "messages"
        )
    model = given.get("model")
    if model is not None and not isinstance(model, str):
        raise InvalidRequestError(f"model must be a string, got {short_repr(model)}", "model")
    stream = read_boolean(given, "stream", False)
    return ChatRequest(
        messages=messages,
        model=model,
        tools=tools,
        tool_choice=read_tool_choice(given, tools),
        sampling=sampling,
        n=read_n(given),
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        parallel_tool_calls=read_boolean(given, "parallel_tool_calls", True),
        response_format=read_response_format(given),
        stream=stream,
        include_usage=_include_usage(given, stream),
    )


def given_parameters(body: object) -> dict[str, Any]:
    """Return the parameters of a body that are not null.

    Raises:
        InvalidRequestError: the body is not a JSON object.
    """
    if not isinstance(body, Mapping):
        raise InvalidRequestError(f"the body must be a JSON object, got {short_repr(body)}")
    return {name: value for name, value in body.items() if value is not None}


def sampling_parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters of a body (see `ChatRequest.sampling`).

    Args:
        given: the parameters of the body that are not null.

    Raises:
        InvalidRequestError: a value has the wrong type or is out of range.
        UnsupportedParameterError: a parameter cannot be honoured.
    """
    sampling: dict[str, Any] = {}
    for name, low, high in _NUMBERS:
        if name in given:
            sampling[name] = _number(given, name, low, high)
    if sampling.get("top_p") == 0:
        raise InvalidRequestError("top_p must be above 0 and at most 1, got 0", "top_p")
    if "top_k" in given:
        sampling["top_k"] = read_integer(given, "top_k", -1, -1, 2**31 - 1) or -1  # vLLM accepts 0 for all tokens
    if "seed" in given:
        sampling["seed"] = read_integer(given, "seed", 0, -(2**63), 2**63 - 1)
    limits = {
        name: read_integer(given, name, 1, 1, 2**31 - 1)
        for name in ("max_tokens", "max_completion_tokens")
        if name in given
    }
    if len(set(limits.values())) > 1:
        raise InvalidRequestError(
            "max_tokens and max_completion_tokens differ; set only max_completion_tokens", "max_completion_tokens"
        )
    if limits:
        sampling["max_tokens"] = min(limits.values())
    stop = given.get("stop")
    if stop is not None and stop != []:
        stops = [stop] if isinstance(stop, str) else stop
        valid = isinstance(stops, Sequence) and len(stops) <= _MAX_STOPS
        if not valid or not all(isinstance(text, str) and text for text in stops):
            raise InvalidRequestError(
                f"stop must be a string or a list of at most {_MAX_STOPS} strings that are not empty, got "
                f"{short_repr(stop)}",
                "stop",
            )
        sampling["stop"] = tuple(dict.fromkeys(stops))
    return sampling


_NUMBERS = (
    ("temperature", 0.0, 2.0),
    ("top_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
)
# These parameters identify or store the request, and do not change an answer.
_WITHOUT_EFFECT = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
)
_PARAMETERS = _WITHOUT_EFFECT | {
    *(name for name, _, _ in _NUMBERS),
    *("messages", "model", "tools", "tool_choice", "top_k", "max_tokens", "max_completion_tokens", "stop", "seed"),
    *("n", "logprobs", "top_logprobs", "parallel_tool_calls", "response_format", "stream", "stream_options"),
}
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


def _unsupported(name: str) -> UnsupportedParameterError:
    advice = _ADVICE.get(name, "; leave it out")
    return UnsupportedParameterError(f"the model in training cannot honour {name}{advice}", name)


def _check_names(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name in _PARAMETERS:
            continue
        if name not in _NEUTRAL_VALUES:
            raise InvalidRequestError(f"unknown parameter {short_repr(name)}; leave it out", str(name))
        if value not in _NEUTRAL_VALUES[name]:
            raise _unsupported(name)


def read_boolean(given: Mapping[str, Any], name: str, default: bool) -> bool:
    """Return a boolean parameter.

    Raises:
        InvalidRequestError: it is not a boolean.
    """
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{name} must be true or false, got {short_repr(value)}", name)
    return value


def read_integer(given: Mapping[str, Any], name: str, default: int, low: int, high: int) -> int:
    """Return an integer parameter.

    Raises:
        InvalidRequestError: it is not an integer from `low` to `high`.
    """
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequestError(f"{name} must be an integer from {low} to {high}, got {short_repr(value)}", name)
    return value


def read_top_logprobs(given: Mapping[str, Any], logprobs: bool) -> int:
    """Return the number of alternatives per token that a body asks for.

    Raises:
        InvalidRequestError: it is invalid, or asked for without `logprobs`.
    """
    number = read_integer(given, "top_logprobs", 0, 0, _MAX_TOP_LOGPROBS)
    if number and not logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs: true", "top_logprobs")
    return number


def read_n(given: Mapping[str, Any]) -> int:
    """Return the number of answers that a body asks for.

    Raises:
        InvalidRequestError: it is invalid.
    """
    return read_integer(given, "n", 1, 1, _MAX_CHOICES)


def _number(given: Mapping[str, Any], name: str, low: float, high: float) -> float:
    value = given[name]
    if (
        isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high  # true for NaN
    ):
        raise InvalidRequestError(f"{name} must be a number from {low:g} to {high:g}, got {short_repr(value)}", name)
    return float(value)


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


def read_tool_choice(
    given: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] | None
) -> str | Mapping[str, Any] | None:
    """Return whether an answer may call tools (see `ChatRequest.tool_choice`).

    Raises:
        InvalidRequestError: it is invalid, or names a tool that is not offered.
    """
    choice: str | Mapping[str, Any] | None = given.get("tool_choice")
    if choice in (None, "auto", "none"):
        return choice
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if choice != "required" and not isinstance(name, str):
        raise InvalidRequestError(
            "tool_choice must be 'auto', 'none', 'required' or {'type': 'function', 'function': {'name': …}}, got "
            f"{short_repr(choice)}",
            "tool_choice",
        )
    names = [tool["function"]["name"] for tool in tools or ()]
    if not names:
        raise InvalidRequestError("tool_choice needs tools, and the request has none", "tool_choice")
    if name is not None and name not in names:
        raise InvalidRequestError(
            f"tool_choice names {short_repr(name)}, which is not among the tools ({', '.join(names)})", "tool_choice"
        )
    return choice


def read_response_format(given: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the format that an answer must have (see `ChatRequest.response_format`).

    Raises:
        InvalidRequestError: it is invalid.
    """
    value = given.get("response_format")
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind not in ("text", "json_object", "json_schema"):
        raise InvalidRequestError(
            f"response_format.type must be text, json_object or json_schema, got {short_repr(value)}", "response_format"
        )
    schema = value.get("json_schema")
    if kind == "json_schema" and not (isinstance(schema, Mapping) and isinstance(schema.get("schema"), Mapping)):
        raise InvalidRequestError("response_format.json_schema.schema must be a JSON schema", "response_format")
    return None if kind == "text" else value


def _include_usage(given: Mapping[str, Any], stream: bool) -> bool:
    options = given.get("stream_options", {})
    if not isinstance(options, Mapping):
        raise InvalidRequestError(f"stream_options must be an object, got {short_repr(options)}", "stream_options")
    if options and not stream:
        raise InvalidRequestError("stream_options needs stream: true", "stream_options")
    if unknown := sorted(options.keys() - {"include_usage", "include_obfuscation"}):
        raise InvalidRequestError(f"stream_options has the unknown option {short_repr(unknown[0])}", "stream_options")
    return read_boolean(options, "include_usage", False)
