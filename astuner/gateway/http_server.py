"""The gateway: an HTTP server in a thread of the process that runs the episodes."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from loguru import logger

from astuner.config.services import GatewayConfig
from astuner.errors import ServiceError, WorkflowError
from astuner.gateway.sessions import EpisodeSession, KeyClaims, KeySigner
from astuner.model_tuner.framework_adapters import OpenAiEndpoint
from astuner.model_tuner.targets import DebugModel
from astuner.model_tuner.tuner import ModelTuner
from astuner.system.localhost import BACKLOG, listening_socket

if TYPE_CHECKING:
    import uvicorn

_START_SECONDS = 30.0
_END_SECONDS = 5.0
# The keys of an episode expire this long after the time limit of its workflow, which may be handled late.
_KEY_GRACE_SECONDS = 60.0
_MAX_PORTS = 1000


class Gateway:
    """Serves the models of this process's episodes to OpenAI-compatible clients.

    The server starts when the first endpoint is opened, in a daemon thread with its own event loop. The episodes may
    run in any threads.
    """

    def __init__(self, settings: GatewayConfig | None = None, model_names: Sequence[str] = ()) -> None:
        """Serve the model in training as `astuner`, under `model_names`, and under those of `settings`."""
        self.settings = settings or GatewayConfig()
        names = ("astuner", *model_names, *self.settings.model_names)
        self.names_of_trained_model = tuple(dict.fromkeys(names))
        self.is_draining = False
        self.signer = KeySigner()
        self._sessions: dict[int, EpisodeSession] = {}
        self._by_tuner: dict[ModelTuner, EpisodeSession] = {}
        self._calls = 0
        self._lock = threading.Lock()
        self._server: _RunningServer | None = None
        self._is_closed = False
        self._pid = os.getpid()
        _gateways.add(self)

    @contextlib.contextmanager
    def episode(
        self, tuner: ModelTuner, cancel_workflow: Callable[[], object] = lambda: None, seconds: float | None = None
    ) -> Iterator[EpisodeSession]:
        """Serve the endpoints of an episode during the block.

        At the end of the block, the calls that no client has received are cut, and the keys become invalid.

        Args:
            cancel_workflow: cancels the workflow of the episode. Called from another thread.
            seconds: the time limit of the workflow; None for no limit.
        """
        expires = time.monotonic() + seconds + _KEY_GRACE_SECONDS if seconds is not None else float("inf")
        number = secrets.randbits(53)
        context = contextvars.copy_context()
        session = EpisodeSession(number, tuner, cancel_workflow, expires, threading.get_ident(), context)
        self._sessions[number] = self._by_tuner[tuner] = session
        try:
            yield session
        finally:
            self.end_episode(tuner)

    def end_episode(self, tuner: ModelTuner) -> None:
        """End the calls of an episode, and make its keys invalid. May be called again. Thread-safe."""
        session = self._by_tuner.pop(tuner, None)
        if session is None or os.getpid() != self._pid:
            return
        del self._sessions[session.number]
        server = self._server
        if server is None:
            session.is_closed = True
            return
        server.run(session.end())

    def open_endpoint(
        self,
        tuner: ModelTuner,
        agent_name: str,
        target_tag: str,
        debug_model: DebugModel | None,
        *,
        issues_keys: bool = False,
    ) -> OpenAiEndpoint:
        """Return an endpoint for one of the episode's agents; start the server if it does not run. Thread-safe.

        In a forked process, the endpoint is that of the parent. For `issues_keys`, see `KeyClaims`.
        WorkflowError: the episode has ended or has not started. ServiceError: the server cannot be started.
        """
        session = self._by_tuner.get(tuner)
        if session is None:
            raise WorkflowError(
                "the episode of this model_tuner is not running, so it has no endpoint; call "
                "model_tuner.as_oai_baseurl_apikey() in `execute`"
            )
        number = None
        if debug_model is not None:
            number = len(session.debug_models)
            session.debug_models.append(debug_model)
        claims = KeyClaims(session.number, agent_name, target_tag, number, session.expires, issues_keys)
        return OpenAiEndpoint(self._started().base_url, self.signer.sign(claims))

    def close(self) -> None:
        """Reject new calls, wait at most `drain_seconds` for calls in progress, and stop the server."""
        with self._lock:
            self.is_draining = self._is_closed = True
            server, self._server = self._server, None
        if server is not None and os.getpid() == self._pid:
            server.stop()
        for tuner in list(self._by_tuner):
            self.end_episode(tuner)

    # The routes call the following methods, on the event loop of the server.

    def admit(self, key: str) -> tuple[KeyClaims, EpisodeSession] | None:
        """Return the claims and the session of a key; None if it is not valid, or its episode has ended."""
        claims = self.signer.verify(key)
        session = None if claims is None else self._sessions.get(claims.session)
        return None if claims is None or session is None else (claims, session)

    def model_names(self, session: EpisodeSession) -> list[str]:
        """Return the names of the models that an episode's keys may call."""
        return [*self.names_of_trained_model, *session.tuner.forwarded_models]

    def reserve_call(self) -> bool:
        """Count a call that starts; return False if there are too many."""
        if self._calls >= self.settings.max_concurrent_calls:
            return False
        self._calls += 1
        return True

    def release_call(self) -> None:
        """Count a call that has ended."""
        self._calls -= 1

    def start_before_fork(self) -> None:
        """Start the server if an episode runs in this thread: its child may want to call the model."""
        thread = threading.get_ident()
        if self._server is None and any(session.thread == thread for session in list(self._sessions.values())):
            self._started()

    def _started(self) -> _RunningServer:
        server = self._server
        if server is not None:  # without the lock, which another thread may have held when this process was forked
            return server
        with self._lock:
            if self._is_closed:
                raise ServiceError("the gateway is closed, because the run has ended")
            if self._server is None:
                if os.getpid() != self._pid:
                    raise ServiceError(
                        "the gateway does not run in the parent of this process; call "
                        "model_tuner.as_oai_baseurl_apikey() before the process is started"
                    )
                self._server = _RunningServer(self)
            return self._server


class _RunningServer:
    """A uvicorn server in a daemon thread."""

    def __init__(self, gateway: Gateway) -> None:
        import uvicorn

        from astuner.gateway.routes import create_app

        settings = gateway.settings
        self._drain_seconds = settings.drain_seconds
        self._socket = _listen(settings.host, settings.port)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        if settings.host in ("0.0.0.0", "::"):
            host = socket.gethostname()
        self.base_url = f"http://{host}:{self._socket.getsockname()[1]}/v1"
        config = uvicorn.Config(
            create_app(gateway),
            log_config=None,  # it would change the logging of the process
            log_level="warning",
            access_log=False,
            server_header=False,
            date_header=False,
            lifespan="off",
            ws="none",
            backlog=BACKLOG,
            timeout_keep_alive=600,
            timeout_graceful_shutdown=max(1, round(settings.drain_seconds)),
        )
        self._server: uvicorn.Server = uvicorn.Server(config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="gateway", daemon=True)
        # The thread does not belong to the episode that opens the first endpoint.
        contextvars.Context().run(self._thread.start)
        if not self._ready.wait(_START_SECONDS):
            raise ServiceError(f"the gateway did not start within {_START_SECONDS:g} s")
        logger.debug("the gateway listens on {}", self.base_url)

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine on the event loop of the server, and wait for its end for some seconds."""
        assert self._loop is not None
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:  # the loop is closed
            coroutine.close()
            return
        with contextlib.suppress(TimeoutError, asyncio.CancelledError):
            future.result(_END_SECONDS)

    def stop(self) -> None:
        """Stop the server after the calls in progress."""
        self._server.should_exit = True
        self._thread.join(self._drain_seconds + _END_SECONDS)
        self._socket.close()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self._ready.set)
        await self._server.serve([self._socket])


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on the first free port from `port` on; on any free port if `port` is 0."""
    reason = "no port is free"
    for candidate in [0] if port == 0 else range(port, min(port + _MAX_PORTS, 65536)):
        try:
            return listening_socket(host, candidate)
        except OSError as error:
            reason = str(error)
    raise ServiceError(
        f"the gateway cannot listen on {host} from port {port} on: {reason}; check gateway.host and gateway.port"
    )


def _start_before_fork() -> None:
    for gateway in list(_gateways):
        gateway.start_before_fork()


_gateways: weakref.WeakSet[Gateway] = weakref.WeakSet()
os.register_at_fork(before=_start_before_fork)
