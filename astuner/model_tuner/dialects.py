"""The HTTP APIs of the model: how each writes requests, answers, streams and errors.

A further API is one more `Dialect` in `DIALECTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from astuner.model_tuner.answers import ChatAnswer
from astuner.model_tuner.api_errors import ApiError
from astuner.model_tuner.openai_answers import DecodeToken, to_chat_completion, to_chunks
from astuner.model_tuner.openai_format import ChatRequest, parse_chat_request

Event = tuple[str | None, Mapping[str, Any]]
"""The name of an event of a stream, or None for an event without a name, and its data."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """One API.

    Attributes:
        path: the path of its requests.
        parse: returns the request of a JSON body. It raises `InvalidRequestError`.
        body: returns the JSON body of a response. Its arguments are the answers, the request, the name of the model,
            and a function that returns the text of a token.
        events: returns the events of a streamed response, with the same arguments.
        error: returns the JSON body of an error.
        error_event: the name of the event for an error within a stream; None for an event without a name.
        end: the bytes that end a stream.
    """

    path: str
    parse: Callable[[object], ChatRequest]
    body: Callable[[Sequence[ChatAnswer], ChatRequest, str, DecodeToken], Mapping[str, Any]]
    events: Callable[[Sequence[ChatAnswer], ChatRequest, str, DecodeToken], Iterator[Event]]
    error: Callable[[ApiError], Mapping[str, Any]]
    error_event: str | None = None
    end: bytes = b""


def openai_error(error: ApiError) -> dict[str, Any]:
    """Return the body of an error in OpenAI's format."""
    return {
        "error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code},
    }


def _chat_events(
    answers: Sequence[ChatAnswer], request: ChatRequest, model: str, decode_token: DecodeToken
) -> Iterator[Event]:
    for chunk in to_chunks(answers, request, model, decode_token):
        yield None, chunk


DIALECTS = (
    Dialect(
        path="/v1/chat/completions",
        parse=parse_chat_request,
        body=to_chat_completion,
        events=_chat_events,
        error=openai_error,
        end=b"data: [DONE]\n\n",
    ),
)
"""The APIs of the gateway and of clients in the same process."""
