"""The error of invalid requests."""

from __future__ import annotations

from astuner.errors import AstunerError


class TinkerRequestError(AstunerError):
    """A request that the server rejects.

    Attributes:
        status: the HTTP status. The client retries 408, 409, 429 and 5xx for minutes, so these are used only if a retry
            can succeed.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status
