"""Errors in the HTTP APIs, and the statuses and codes of astuner's errors."""

from __future__ import annotations

from dataclasses import dataclass

from astuner.errors import (
    AgentMadness,
    AstunerError,
    CallLimitError,
    ContextLengthError,
    EpisodeError,
    EpisodeStopped,
    InvalidRequestError,
    UnsupportedParameterError,
    WorkflowError,
    describe_error,
    message_of,
)


@dataclass(frozen=True, slots=True)
class ApiError:
    """An error response.

    Attributes:
        kind: OpenAI's `type` of the error.
        code: OpenAI's `code` of the error; None if it has none.
        param: the name of the parameter that is at fault; None if there is none.
        retry_after: seconds after which a client may try again; None if a retry would fail.
    """

    status: int
    message: str
    kind: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    retry_after: int | None = None

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers that tell a client whether to try again. The SDKs of OpenAI and Anthropic obey them."""
        if self.retry_after is None:
            return [(b"x-should-retry", b"false")]
        return [(b"x-should-retry", b"true"), (b"retry-after", str(self.retry_after).encode())]


INVALID_KEY = ApiError(
    401,
    "the API key is not valid: it is forged, belongs to another process, or its episode has ended; use the key that "
    "model_tuner.as_oai_baseurl_apikey() returns in the running episode",
    code="invalid_api_key",
)
DRAINING = ApiError(503, "the gateway is shutting down, because the run ends", "server_error", "shutting_down")


_CODES: tuple[tuple[type[BaseException], str | None], ...] = (
    (UnsupportedParameterError, "unsupported_parameter"),
    (ContextLengthError, "context_length_exceeded"),
    (CallLimitError, "max_steps_exceeded"),
    (EpisodeStopped, "max_steps_exceeded"),
    (AgentMadness, "degenerate_output"),
    (EpisodeError, None),
)
"""The codes of the errors that the request or the episode causes."""


def to_api_error(error: BaseException) -> ApiError:
    """Return the response for an exception of a call."""
    if isinstance(error, WorkflowError) and type(error.__cause__).__module__.partition(".")[0] == "openai":
        return ApiError(502, message_of(error), "server_error", "upstream_error")  # the endpoint of a frozen target
    for kind, code in _CODES:
        if isinstance(error, kind):
            param = error.name if isinstance(error, InvalidRequestError) else None
            if isinstance(error, ContextLengthError):
                param = "messages"
            return ApiError(400, message_of(error), code=code, param=param)
    if isinstance(error, AstunerError):
        return ApiError(500, message_of(error), "server_error", "engine_error")
    return ApiError(500, describe_error(error), "server_error", "internal_error")
