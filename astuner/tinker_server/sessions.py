"""Client sessions, the futures of their requests, and the models in training.

One thread computes for all models, in request order.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

from loguru import logger

from astuner.backbone.training.tinker_policy import TinkerPolicy
from astuner.errors import AstunerError
from astuner.tinker_server.checkpoints import TinkerCheckpoint, TrainingRun
from astuner.tinker_server.trainable_model import BaseLanguageModel, TrainableModel
from astuner.tinker_server.wire import LoraSettings, TinkerRequestError

SESSION_TIMEOUT_SECONDS = 600.0
"""A session ends after this time without a request. Clients send a heartbeat every 10 s."""
EVICTION_SECONDS = 60.0
"""After this time without a request, a session's models may be unloaded to make room for another client."""
RESULT_TTL_SECONDS = 1800.0
"""Seconds for which a result is kept until the client retrieves it."""
RETRIEVED_RESULT_TTL_SECONDS = 60.0
"""Seconds for which a result is kept after retrieval: the response may have been lost."""
MAX_PENDING_REQUESTS = 4096
"""Maximum number of concurrent requests. Beyond it, requests get status 429, on which clients retry later."""

Result = dict[str, Any] | bytes
"""The result of a request: JSON values, or a protobuf message."""
Work = Callable[[], Awaitable[Result]]
_T = TypeVar("_T")
_MAX_REMEMBERED_REQUESTS = 256
"""Number of requests per model that are recognised when the client sends them again."""


@dataclass
class ClientSession:
    """A client's session.

    Attributes:
        last_seen: when its last request came, on the clock of `Sessions`.
        policy: how its models compute; None if the client sent none.
        models: by the client's sequence number, each model's id and the id of the request that created it.
        samplers: by sampling session id, the checkpoint it samples from; None for the base model.
        inflight: by model id, its sampling sessions that follow the model's latest inflight weights.
        display_name, metadata: the client's name of the session, and its metadata.
    """

    session_id: str
    last_seen: float
    policy: TinkerPolicy | None = None
    models: dict[int, tuple[str, str]] = field(default_factory=dict)
    samplers: dict[str, TinkerCheckpoint | None] = field(default_factory=dict)
    inflight: dict[str, list[str]] = field(default_factory=dict)
    display_name: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def owns(self, checkpoint: TinkerCheckpoint) -> bool:
        """Return whether one of the session's models wrote the checkpoint."""
        return any(model_id == checkpoint.run_id for model_id, _ in self.models.values())


class Sessions:
    """The server's open client sessions, with the time of each session's last request."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sessions: dict[str, ClientSession] = {}

    def __iter__(self) -> Iterator[ClientSession]:
        return iter(list(self._sessions.values()))

    def create(
        self,
        policy: TinkerPolicy | None = None,
        *,
        display_name: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> ClientSession:
        """Create a session with a new id and return it."""
        # The id is a secret of the client: whoever knows it can use the session's models.
        session_id = f"session-{uuid.uuid4().hex}"
        session = ClientSession(session_id, self._clock(), policy, display_name=display_name, metadata=metadata or {})
        self._sessions[session.session_id] = session
        return session

    def touch(self, session_id: str) -> ClientSession:
        """Update a session's `last_seen` and return it; `TinkerRequestError` if there is no such session."""
        if session_id not in self._sessions:
            raise TinkerRequestError(
                f"there is no session {session_id!r}: the server was restarted, or the session was inactive for "
                f"{SESSION_TIMEOUT_SECONDS:.0f} s; create a new ServiceClient and load the last checkpoint",
                404,
            )
        session = self._sessions[session_id]
        session.last_seen = self._clock()
        return session

    def sampler(self, sampler_id: str) -> tuple[ClientSession, TinkerCheckpoint | None]:
        """Return the client session of a sampling session, and its checkpoint (None if it samples from the base model).

        Raises:
            TinkerRequestError: there is no such sampling session.
        """
        for session in self._sessions.values():
            if sampler_id in session.samplers:
                session.last_seen = self._clock()
                return session, session.samplers[sampler_id]
        raise TinkerRequestError(f"there is no sampling session {sampler_id!r}; create a new sampling client", 404)

    def inactive_for(self, seconds: float) -> list[ClientSession]:
        """Return the sessions without a request for at least `seconds`, the longest inactive first."""
        now = self._clock()
        inactive = (session for session in self if now - session.last_seen >= seconds)
        return sorted(inactive, key=lambda session: session.last_seen)

    def end(self, session: ClientSession) -> None:
        """Remove a session."""
        self._sessions.pop(session.session_id, None)


@dataclass
class _Future:
    session_id: str
    task: asyncio.Task[Result]
    can_cancel: bool
    expires: float | None = None
    """Time at which the result is dropped; None while it is being computed."""


class Futures:
    """The results of requests, by request id. Belongs to one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._futures: dict[str, _Future] = {}
        # The prefix distinguishes this server's ids from those of an earlier one.
        self._prefix, self._count = secrets.token_hex(4), 0
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._futures)

    def check_capacity(self) -> None:
        """Raise `TinkerRequestError` if too many requests are pending."""
        if sum(future.expires is None for future in self._futures.values()) >= MAX_PENDING_REQUESTS:
            raise TinkerRequestError(f"{MAX_PENDING_REQUESTS} requests are pending; wait until some are done", 429)

    def start(self, session_id: str, work: Work, *, can_cancel: bool = False) -> str:
        """Start `work`, which returns the response, and return the request id of its result.

        A request may belong to no session, whose id is then empty.

        Raises:
            TinkerRequestError: the server is shutting down.
        """
        if self._is_closed:
            raise TinkerRequestError("the server is shutting down", 503)
        self._count += 1
        request_id = f"{self._prefix}-{self._count}"
        future = _Future(session_id, asyncio.create_task(_response(work)), can_cancel)
        self._futures[request_id] = future

        def set_expiry(_task: asyncio.Task[Result]) -> None:
            if future.expires is None:
                future.expires = self._clock() + RESULT_TTL_SECONDS

        future.task.add_done_callback(set_expiry)
        return request_id

    async def retrieve(self, request_id: str, timeout: float) -> Result | None:
        """Return a result, or None if it is not available after `timeout` seconds.

        Raises:
            TinkerRequestError: there is no such request, or its result was dropped.
        """
        future = self._futures.get(request_id)
        if future is None and not request_id.startswith(f"{self._prefix}-"):
            raise TinkerRequestError(f"there is no request {request_id!r}; was the server restarted?", 404)
        if future is not None:
            await asyncio.wait([future.task], timeout=timeout)
        if future is None or future.task.cancelled():
            raise TinkerRequestError(
                f"the result of request {request_id} was dropped: it was cancelled, its session ended, or it was not "
                "retrieved in time",
                410,
            )
        if not future.task.done():
            return None
        expires = self._clock() + RETRIEVED_RESULT_TTL_SECONDS
        future.expires = expires if future.expires is None else min(future.expires, expires)
        return future.task.result()

    def cancel(self, request_id: str) -> None:
        """Cancel a request, if it has no result yet and may be cancelled."""
        future = self._futures.get(request_id)
        if future is not None and future.can_cancel:
            future.task.cancel()

    def sweep(self) -> None:
        """Drop expired results."""
        now = self._clock()
        for request_id in [key for key, future in self._futures.items() if future.expires and future.expires <= now]:
            del self._futures[request_id]

    def drop(self, session_id: str) -> None:
        """Cancel and drop the requests of a session."""
        for request_id, future in list(self._futures.items()):
            if future.session_id == session_id:
                future.task.cancel()
                del self._futures[request_id]

    def close(self) -> None:
        """Cancel and drop all requests, and reject new ones."""
        self._is_closed = True
        for session_id in {future.session_id for future in self._futures.values()}:
            self.drop(session_id)


async def _response(work: Work) -> Result:
    """Return a result, or an error, which the client raises."""
    try:
        return await work()
    except AstunerError as error:
        return {"error": str(error), "category": "user"}
    # Any other error fails this request only; the server continues.
    except Exception as error:
        return server_error(error)


def server_error(error: Exception) -> dict[str, Any]:
    """Log an unexpected error of a request, and return the result that tells the client."""
    logger.opt(exception=error).error("a request failed: {}", error)
    return {"error": f"{type(error).__name__}: {error}", "category": "server"}


@dataclass
class ActiveModel:
    """A model in training.

    Attributes:
        session_id: the client session that created it.
        trainable: the model; None until it is created and after it is unloaded.
        last_used: time of its last request, on the system's clock.
        requests: the kind and id of its requests, by the client's sequence number.
    """

    run: TrainingRun
    session_id: str
    trainable: TrainableModel | None = None
    last_used: float = field(default_factory=time.time)
    requests: OrderedDict[int, tuple[str, str]] = field(default_factory=OrderedDict)

    def request_once(self, seq_id: int | None, kind: str, start: Callable[[], str]) -> str:
        """Return the id of a request that `start` starts, unless the client has repeated it because no answer came.

        Raises:
            TinkerRequestError: another kind of request had this sequence number.
        """
        if seq_id is None:
            return start()
        earlier_kind, request_id = self.requests.get(seq_id) or (kind, start())
        if earlier_kind != kind:
            raise TinkerRequestError(
                f"seq_id {seq_id} was used for {earlier_kind} and now for {kind}; only one client may train a model"
            )
        self.requests.setdefault(seq_id, (kind, request_id))
        while len(self.requests) > _MAX_REMEMBERED_REQUESTS:
            self.requests.popitem(last=False)
        return request_id


class ModelRegistry:
    """The models in training, by id. Belongs to one event loop."""

    def __init__(self, base_model: BaseLanguageModel) -> None:
        self._base_model = base_model
        self._models: dict[str, ActiveModel] = {}
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tinker-train")
        self._closing = threading.Event()

    def __len__(self) -> int:
        return len(self._models)

    def runs(self) -> list[TrainingRun]:
        """Return the training runs of all models."""
        return [model.run for model in self._models.values()]

    def get(self, model_id: str) -> ActiveModel:
        """Return a model; `TinkerRequestError` if there is no such model."""
        if model_id not in self._models:
            raise TinkerRequestError(
                f"there is no model {model_id!r} in training: it was unloaded, its client was inactive for too long, "
                "or the server was restarted; load its last checkpoint into a new model",
                404,
            )
        model = self._models[model_id]
        model.last_used = time.time()
        return model

    def add(
        self,
        session_id: str,
        model_seq_id: int,
        base_model: str,
        lora: LoraSettings,
        policy: TinkerPolicy,
        metadata: Mapping[str, Any],
    ) -> ActiveModel:
        """Add a model without weights; `create_weights` creates them.

        `model_seq_id` is the client's number of the model in the session; for the others, see `TrainingRun`.
        """
        # The client composes the same id for a model that it creates from a checkpoint.
        run_id = f"{session_id}:train:{model_seq_id}"
        model = ActiveModel(TrainingRun(run_id, base_model, lora, policy, metadata, datetime.now(UTC)), session_id)
        self._models[run_id] = model
        return model

    async def create_weights(self, model: ActiveModel) -> None:
        """Create the weights of a new model.

        Raises:
            TinkerRequestError, ModelError: they cannot be created; the model is removed.
        """
        try:
            create = partial(TrainableModel, self._base_model, model.run.lora, model.run.policy)
            model.trainable = await self._submit(create)
        except BaseException:
            self.remove(model.run.run_id)
            raise

    async def compute(self, model: ActiveModel, function: Callable[[TrainableModel], _T]) -> _T:
        """Call `function` on the training thread, after all earlier requests."""

        def call() -> _T:
            self.check_open()
            if model.trainable is None:
                raise TinkerRequestError(f"model {model.run.run_id} was unloaded before the request was computed", 404)
            return function(model.trainable)

        return await self._submit(call)

    def check_open(self) -> None:
        """Raise TinkerRequestError if the server is shutting down."""
        if self._closing.is_set():
            raise TinkerRequestError("the server is shutting down", 410)

    def remove(self, model_id: str) -> None:
        """Remove a model; its memory is freed after its current computation."""
        model = self._models.pop(model_id, None)
        if model is not None and not self._closing.is_set():
            self._executor.submit(partial(setattr, model, "trainable", None))

    def close(self) -> None:
        """Stop the training thread after its current batch."""
        self._closing.set()
        self._executor.shutdown(cancel_futures=True)

    def _submit(self, function: Callable[[], _T]) -> asyncio.Future[_T]:
        return asyncio.get_running_loop().run_in_executor(self._executor, function)
