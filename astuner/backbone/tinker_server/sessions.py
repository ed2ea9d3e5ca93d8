"""Clients, what is theirs, and when they were last heard of."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from astuner.backbone.tinker_server.checkpoints import Checkpoint
from astuner.backbone.tinker_server.refusal import Refusal

EXPIRES_SECONDS = 600.0
"""A client that was silent for so long is gone; it sends a sign of life every 10 s."""
SILENT_SECONDS = 60.0
"""One that was silent for so long gives its models up where another client needs the room."""


@dataclass
class Session:
    """A client.

    Attributes:
        session_id: its name.
        seen: when it was last heard of.
        models: its models in training, and the request that made each, by the client's own numbers.
        samplers: what its sampling sessions sample from, by their ids; None is the starting model.
    """

    session_id: str
    seen: float
    models: dict[int, tuple[str, str]] = field(default_factory=dict)
    samplers: dict[str, Checkpoint | None] = field(default_factory=dict)


class Sessions:
    """All clients."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sessions: dict[str, Session] = {}

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def begin(self) -> Session:
        """Note a new client."""
        session = Session(f"session-{uuid.uuid4().hex}", self._clock())
        self._sessions[session.session_id] = session
        return session

    def heard_of(self, session_id: str) -> Session:
        """Return a client that has just sent something.

        Raises:
            Refusal: it is unknown here.
        """
        if session_id not in self._sessions:
            raise Refusal(
                f"there is no session {session_id!r}: this server was started after it, or it was silent for "
                f"{EXPIRES_SECONDS:.0f} s; make a new ServiceClient, and load the last checkpoint",
                404,
            )
        session = self._sessions[session_id]
        session.seen = self._clock()
        return session

    def sampler(self, sampler_id: str) -> tuple[Session, Checkpoint | None]:
        """Return a sampling session's client and what it samples from.

        Raises:
            Refusal: it is unknown.
        """
        for session in self._sessions.values():
            if sampler_id in session.samplers:
                session.seen = self._clock()
                return session, session.samplers[sampler_id]
        raise Refusal(f"there is no sampling session {sampler_id!r} on this server; make a new sampling client", 404)

    def silent_for(self, seconds: float) -> list[Session]:
        """Return the clients that have been silent for so long, the longest first."""
        now = self._clock()
        return sorted((one for one in self if now - one.seen >= seconds), key=lambda one: one.seen)

    def end(self, session: Session) -> None:
        """Forget a client."""
        self._sessions.pop(session.session_id, None)
