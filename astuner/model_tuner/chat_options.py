"""The parameters of a chat request, as in OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from astuner.errors import UnsupportedParameterError, short_repr
from astuner.model_tuner.http_api.openai_chat_request import (
    read_boolean,
    read_n,
    read_response_format,
    read_tool_choice,
    read_top_logprobs,
    sampling_parameters,
)


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
        unknown: the names in `given` that are not parameters of the model in training.
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
    unknown: tuple[str, ...] = ()

    @classmethod
    def parse(cls, parameters: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] | None) -> ChatOptions:
        """Check the parameters of a request.

        Args:
            parameters: the parameters by their names in OpenAI's API, and `top_k`; None counts as not given.
            tools: the tools of the request.

        Raises:
            InvalidRequestError: a value is invalid.
        """
        given = {name: value for name, value in parameters.items() if value is not None}
        logprobs = read_boolean(given, "logprobs", False)
        choice = read_tool_choice(given, tools)
        response_format = read_response_format(given)
        return cls(
            **sampling_parameters(given),
            n=read_n(given),
            logprobs=logprobs,
            top_logprobs=read_top_logprobs(given, logprobs),
            tool_choice="none" if choice == "none" else "auto" if choice in (None, "auto") else "required",
            tool_name=choice["function"]["name"] if isinstance(choice, Mapping) else None,
            parallel_tool_calls=read_boolean(given, "parallel_tool_calls", True),
            json_schema=None if response_format is None else _json_schema(response_format),
            given=given,
            unknown=tuple(sorted(given.keys() - _PARAMETERS)),
        )

    def reject_unknown(self) -> None:
        """Raise an error if there are unknown parameters.

        Raises:
            UnsupportedParameterError: there are unknown parameters.
        """
        if self.unknown:
            name = self.unknown[0]
            raise UnsupportedParameterError(
                f"{name}={short_repr(self.given[name])} is not a parameter of the model in training; it takes "
                f"{', '.join(sorted(_PARAMETERS))}. Leave {name} out",
                name,
            )


_PARAMETERS = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "max_tokens",
        "max_completion_tokens",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "stop",
        "n",
        "logprobs",
        "top_logprobs",
        "tool_choice",
        "parallel_tool_calls",
        "response_format",
    }
)


def _json_schema(response_format: Mapping[str, Any]) -> str:
    """Return the JSON schema of a `response_format`, as JSON."""
    if response_format["type"] == "json_object":
        return '{"type": "object"}'
    return json.dumps(response_format["json_schema"]["schema"], ensure_ascii=False)
