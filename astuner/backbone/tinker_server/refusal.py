"""What the server answers to a request that it will not serve."""

from __future__ import annotations

from astuner.errors import AstunerError


class Refusal(AstunerError):
    """A request that cannot be served as it was sent.

    Attributes:
        status: the HTTP status. The client tries 408, 409, 429 and 5xx again for minutes, so none of them is for a
            request that will never do.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status
