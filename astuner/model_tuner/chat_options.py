"""The parameters of a chat request, as in OpenAI's API, and their combination with the run's settings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from astuner.errors import ContextLengthError, InvalidRequestError, UnsupportedParameterError, short_repr
from astuner.schema import Tools

SAMPLING_PARAMETERS = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty")
"""The parameters of the distribution that tokens are sampled from."""


OPTION_NAMES = {
    *("temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens", "seed", "presence_penalty", "stop", "n"),
    *("frequency_penalty", "logprobs", "top_logprobs", "tool_choice", "parallel_tool_calls", "response_format"),
}
"""The options of a chat request: parameters from OpenAI's API, and `top_k`."""
_NUMBERS = (
    ("temperature", 0.0, 2.0),
    ("top_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
)
_MAX_CHOICES = 128
_MAX_STOPS = 4
_MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """The checked parameters of a chat request; None where the run's settings apply.

    Attributes:
        temperature, top_p, top_k, max_tokens, seed, presence_penalty, frequency_penalty: as in `SamplingParams`.
        stop: at most four strings; the answer ends before the first of them.
        n: the number of answers.
        logprobs: whether the request asks for the logprobs of the sampled tokens, which are recorded in any case.
        top_logprobs: the number of most likely tokens to return for each token.
        tool_choice: whether the answer may, must not or must call tools.
        tool_name: with `required`, the only tool that the answer may call; None for any.
        parallel_tool_calls: whether an answer may have several tool calls.
        json_schema: the schema of the answer, as JSON, from `response_format`; None for text.
        given: the parameters as they were given, by name.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    logprobs: bool = False
    top_logprobs: int = 0
    tool_choice: Literal["auto", "none", "required"] = "auto"
    tool_name: str | None = None
    parallel_tool_calls: bool = True
    json_schema: str | None = None
    given: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, parameters: Mapping[str, Any], tools: Tools | None) -> ChatOptions:
        """Check the parameters of a request.

        Args:
            parameters: the parameters by their names in OpenAI's API, and `top_k`; None counts as not given.

        Raises:
            InvalidRequestError: a value is invalid.
        """
        given = {name: value for name, value in parameters.items() if value is not None}
        logprobs = read_boolean(given, "logprobs", False)
        top_logprobs = _integer(given, "top_logprobs", 0, 0, _MAX_TOP_LOGPROBS)
        if top_logprobs and not logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: true", "top_logprobs")
        choice = _tool_choice(given, tools)
        return cls(
            **_sampling(given),
            n=_integer(given, "n", 1, 1, _MAX_CHOICES),
            logprobs=logprobs,
            top_logprobs=top_logprobs,
            tool_choice="none" if choice == "none" else "auto" if choice in (None, "auto") else "required",
            tool_name=choice["function"]["name"] if isinstance(choice, Mapping) else None,
            parallel_tool_calls=read_boolean(given, "parallel_tool_calls", True),
            json_schema=_json_schema(given),
            given=given,
        )

    def reject_unknown(self) -> None:
        """Raise `UnsupportedParameterError` if a parameter is none of the model in training."""
        for name in sorted(self.given.keys() - OPTION_NAMES):
            raise UnsupportedParameterError(
                f"{name}={short_repr(self.given[name])} is not a parameter of the model in training; it takes "
                f"{', '.join(sorted(OPTION_NAMES))}. Leave {name} out",
                name,
            )


def read_boolean(given: Mapping[str, Any], name: str, default: bool) -> bool:
    """Return a boolean parameter.

    Raises:
        InvalidRequestError: it is not a boolean.
    """
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{name} must be true or false, got {short_repr(value)}", name)
    return value


def _integer(given: Mapping[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequestError(f"{name} must be an integer from {low} to {high}, got {short_repr(value)}", name)
    return value


def _sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    sampling: dict[str, Any] = {}
    for name, low, high in _NUMBERS:
        if name in given:
            value = given[name]
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not low <= value <= high:  # true for NaN
                raise InvalidRequestError(
                    f"{name} must be a number from {low:g} to {high:g}, got {short_repr(value)}", name
                )
            sampling[name] = float(value)
    if sampling.get("top_p") == 0:
        raise InvalidRequestError("top_p must be above 0 and at most 1, got 0", "top_p")
    if "top_k" in given:
        sampling["top_k"] = _integer(given, "top_k", -1, -1, 2**31 - 1) or -1  # vLLM accepts 0 for all tokens
    if "seed" in given:
        sampling["seed"] = _integer(given, "seed", 0, -(2**63), 2**63 - 1)
    limits = {
        name: _integer(given, name, 1, 1, 2**31 - 1)
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


def _tool_choice(given: Mapping[str, Any], tools: Tools | None) -> str | Mapping[str, Any] | None:
    """Return whether an answer may call tools, in OpenAI's format."""
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


def _json_schema(given: Mapping[str, Any]) -> str | None:
    """Return the JSON schema that `response_format` demands, as JSON; None for text."""
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
    if kind == "text":
        return None
    return json.dumps({"type": "object"} if kind == "json_object" else schema["schema"], ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class CallSettings:
    """Settings for an episode's LLM calls, from `rollout` and `data` of the configuration; lengths are in tokens.

    `client_sampling` is `honour` or `override` (see `rollout.client_sampling`). `fixed_sampling` has the names of the
    parameters in which trained calls cannot differ from the run's settings. With `seeds_by_prompt`, a call's seed
    depends on its prompt, and otherwise on the number of calls before it, which concurrent calls may change.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 512
    max_model_len: int = 4096
    max_prompt_length: int = 4096
    max_response_length: int = 4096
    max_calls: int = 30
    disable_tools: bool = False
    madness_checklist: tuple[str, ...] = ()
    madness_ends_episode: bool = True
    client_sampling: Literal["honour", "override"] = "honour"
    fixed_sampling: tuple[str, ...] = ()
    seeds_by_prompt: bool = False

    def distribution(self, options: ChatOptions, *, trained: bool) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return a call's values for `SAMPLING_PARAMETERS`, and the names of the request's values that were replaced.

        Args:
            options: the parameters of the request.
            trained: whether the call is trained.

        Raises:
            UnsupportedParameterError: a trained call requests a value that the backbone cannot train.
        """
        run = {"presence_penalty": 0.0, "frequency_penalty": 0.0}
        run |= {name: getattr(self, name) for name in ("temperature", "top_p", "top_k")}
        client = {name: getattr(options, name) for name in SAMPLING_PARAMETERS}
        changed = {name: value for name, value in client.items() if value is not None and value != run[name]}
        if self.client_sampling == "override":
            return run, (*changed, *(["seed"] if options.seed is not None else []))
        for name, value in changed.items():
            if trained and name in self.fixed_sampling:
                raise UnsupportedParameterError(
                    f"the request has {name}={value!r}, but this backbone trains calls with the run's {name} only, "
                    f"which is {run[name]!r}: send this value or none, or set rollout.client_sampling: override to "
                    "replace the values of requests",
                    name,
                )
        return run | changed, ()

    def max_answer_tokens(self, prompt_len: int, first_prompt_len: int | None, engine_max_model_len: int) -> int:
        """Return the number of tokens that an answer may have.

        Args:
            first_prompt_len: the length of the conversation's first prompt; None if this is the first one.
            engine_max_model_len: the limit of the engine for prompt and answer together.

        Raises:
            ContextLengthError: the prompt is longer than configured, or leaves no room for an answer.
        """
        if first_prompt_len is None and prompt_len > self.max_prompt_length:
            raise ContextLengthError(
                f"the first prompt has {prompt_len} tokens, but data.max_prompt_length is {self.max_prompt_length}; "
                "raise data.max_prompt_length, or shorten the prompt"
            )
        first = prompt_len if first_prompt_len is None else first_prompt_len
        room = {
            "rollout.max_model_len": self.max_model_len - prompt_len,
            "the model's context length": engine_max_model_len - prompt_len,
            "data.max_response_length": first + self.max_response_length - prompt_len,
        }
        limit = min(room, key=lambda name: room[name])
        if room[limit] < 1:
            more = f"raise {limit}" if "." in limit else "use a model with a longer context"
            raise ContextLengthError(
                f"a prompt of {prompt_len} tokens leaves no room for an answer within {limit}; "
                f"{more}, or keep the agent's history shorter"
            )
        return min(room[limit], self.max_tokens)
