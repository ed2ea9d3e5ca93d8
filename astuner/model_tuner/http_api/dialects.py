"""The HTTP APIs of the model: how each writes requests, answers, streams and errors.

To add an API, add a `Dialect` to `DIALECTS`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import orjson

from astuner.model_tuner.answers import ChatAnswer
from astuner.model_tuner.http_api.anthropic_messages import (
    parse_count_request,
    parse_messages_request,
    to_messages_error,
    to_messages_events,
    to_messages_response,
)
from astuner.model_tuner.http_api.api_errors import ApiError
from astuner.model_tuner.http_api.openai_completions import (
    DecodeToken,
    parse_chat_request,
    parse_completion_request,
    to_chat_completion,
    to_chunks,
    to_text_completion,
    to_text_events,
)
from astuner.model_tuner.http_api.openai_responses import (
    parse_responses_request,
    to_response,
    to_response_events,
    to_responses_error,
)

if TYPE_CHECKING:
    from astuner.model_tuner.tuner import ModelTuner

Event = tuple[str | None, Mapping[str, Any]]
"""An event in a stream: its name, or None for an event without a name, and its data."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """One API.

    Attributes:
        parse: returns the request of a JSON body. Its arguments are the body and the model of the episode, to whose
            earlier answers a request may refer. It raises `InvalidRequestError` if a parameter is missing or invalid,
            and `UnsupportedParameterError` if one cannot be honoured.
        body: returns the JSON body of a response. Its arguments are the answers, the request, the model's name, and a
            function that returns a token's text.
        events: returns the events of a streamed response, with the same arguments.
        error: returns the JSON body of an error.
        error_event: returns the event for an error within a stream.
        end: the bytes that end a stream.
    """

    path: str
    parse: Callable[[object, ModelTuner], Any]
    body: Callable[[Sequence[ChatAnswer], Any, str, DecodeToken], Mapping[str, Any]]
    events: Callable[[Sequence[ChatAnswer], Any, str, DecodeToken], Iterator[Event]]
    error: Callable[[ApiError], Mapping[str, Any]]
    error_event: Callable[[ApiError], Event]
    end: bytes = b""


def from_json(body: bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: the text is not JSON.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        try:
            return json.loads(body)  # accepts half of a surrogate pair, which a model may write in a string
        except RecursionError:
            raise error from None


def to_json(content: Mapping[str, Any]) -> bytes:
    """Return a value as JSON."""
    try:
        return orjson.dumps(content)
    except TypeError:
        # A tool call's arguments may have an integer with more than 64 bits, or half of a surrogate pair.
        return json.dumps(content, separators=(",", ":")).encode()


def to_event(name: str | None, data: Mapping[str, Any]) -> bytes:
    """Return one event for a stream of server-sent events."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + to_json(data) + b"\n\n"


def openai_error(error: ApiError) -> dict[str, Any]:
    """Return the body of an error in OpenAI's format."""
    return {
        "error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code},
    }


def _responses_error_event(error: ApiError) -> Event:
    body = openai_error(to_responses_error(error))
    # The fields of the documented event, and those that OpenAI's client raises an error for.
    return "error", {**body["error"], **body, "type": "error", "sequence_number": 0}


DIALECTS = (
    Dialect(
        path="/v1/chat/completions",
        parse=lambda body, tuner: parse_chat_request(body),
        body=to_chat_completion,
        events=to_chunks,
        error=openai_error,
        error_event=lambda error: (None, openai_error(error)),
        end=b"data: [DONE]\n\n",
    ),
    Dialect(
        path="/v1/completions",
        parse=lambda body, tuner: parse_completion_request(body),
        body=to_text_completion,
        events=to_text_events,
        error=openai_error,
        error_event=lambda error: (None, openai_error(error)),
        end=b"data: [DONE]\n\n",
    ),
    Dialect(
        path="/v1/responses",
        parse=lambda body, tuner: parse_responses_request(body, tuner.calls),
        body=to_response,
        events=to_response_events,
        error=lambda error: openai_error(to_responses_error(error)),
        error_event=_responses_error_event,
    ),
    Dialect(
        path="/v1/messages",
        parse=lambda body, tuner: parse_messages_request(body),
        body=lambda answers, request, model, decode_token: to_messages_response(answers, model),
        events=lambda answers, request, model, decode_token: to_messages_events(answers, model),
        error=to_messages_error,
        error_event=lambda error: ("error", to_messages_error(error)),
    ),
)
"""The APIs for the gateway and for clients in the same process."""

TOKEN_COUNTING = replace(
    DIALECTS[-1], path="/v1/messages/count_tokens", parse=lambda body, tuner: parse_count_request(body)
)
"""The API that counts the tokens in a request to `/v1/messages`, without an answer."""
