"""Episodes at the gateway: the signed keys that name them, the calls that reach them, and their clients' retries."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextvars
import hashlib
import hmac
import json
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from dataclasses import astuple, dataclass, field
from typing import Any

from astuner.errors import AgentMadness, AstunerError, EpisodeError, EpisodeStopped, WorkflowError, message_of, text_of
from astuner.model_tuner.answers import ChatAnswer
from astuner.model_tuner.targets import DebugModel
from astuner.model_tuner.tuner import ModelTuner

_PREFIX = "sk-astuner-"
_MAC_BYTES = 32
_MAX_KEY_CHARS = 16384


@dataclass(frozen=True, slots=True)
class KeyClaims:
    """The contents of a key.

    Attributes:
        session: the number of the episode's session in this process.
        agent_name, target_tag: as in `ModelTuner.for_agent`.
        debug_model: the number of the endpoint's debug model in its session; None if it has none.
        expires: the time at which the key expires, on the clock `time.monotonic`.
        issues_keys: whether the gateway issues keys for other agents of the episode to its holder, which is a
            `ModelTuner` in another process.
    """

    session: int
    agent_name: str
    target_tag: str
    debug_model: int | None
    expires: float
    issues_keys: bool = False


class KeySigner:
    """Signs and checks keys with HMAC-SHA256 and a secret that exists only in this process and its forks."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def sign(self, claims: KeyClaims) -> str:
        """Return the key with these claims."""
        payload = json.dumps(astuple(claims)).encode()
        return _PREFIX + base64.urlsafe_b64encode(self._mac(payload) + payload).rstrip(b"=").decode()

    def verify(self, key: str) -> KeyClaims | None:
        """Return the claims of a key; None if this process did not sign it, or it has expired."""
        if not key.startswith(_PREFIX) or len(key) > _MAX_KEY_CHARS or not key.isascii():
            return None
        text = key[len(_PREFIX) :]
        try:
            signed = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        except binascii.Error:
            return None
        mac, payload = signed[:_MAC_BYTES], signed[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(payload)):
            return None
        claims = KeyClaims(*json.loads(payload))
        return claims if claims.expires >= time.monotonic() else None

    def _mac(self, payload: bytes) -> bytes:
        return hmac.new(self._secret, payload, hashlib.sha256).digest()


# Seconds for which an answer that did not reach its client waits for the client's retry, and seconds for which an
# answer that did reach it is kept for one. The SDKs of OpenAI and Anthropic retry after 0.5 to 1 s at first.
_UNDELIVERED_SECONDS = 2.0
_DELIVERED_SECONDS = 10.0
_MAX_DELIVERED = 64
# How often an agent may call the model after an error that ends the episode, before its workflow is cancelled.
_MAX_CALLS_AFTER_FAILURE = 3

Answers = tuple[ChatAnswer, ...]


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """The identity of a request, by which its retries are recognised.

    Attributes:
        digest: of the endpoint, the path and the body.
        request_id: the idempotency key or the request id of the client; "" if it has none.
        retry_count: the number of earlier attempts; None if the client does not send it.
    """

    digest: bytes
    request_id: str
    retry_count: int | None

    @property
    def may_be_retried(self) -> bool:
        """Whether a retry of this request would be recognised."""
        return bool(self.request_id) or self.retry_count is not None


@dataclass(eq=False, slots=True)
class GatewayCall:
    """A request to the model that one or more HTTP requests wait for.

    Attributes:
        identity: the identity of the first HTTP request.
        waiting: the number of HTTP requests that wait for the answers or receive them.
        is_delivered: whether a client has received the answers or an error.
        delivered_at: the time of the delivery, on the clock `time.monotonic`.
    """

    task: asyncio.Task[Answers]
    identity: RequestIdentity
    waiting: int = 0
    is_delivered: bool = False
    delivered_at: float = 0.0


@dataclass(eq=False)
class EpisodeSession:
    """One episode at the gateway. Except where noted, only the gateway's event loop uses it.

    Attributes:
        number: unguessable, unique within the process.
        cancel_workflow: cancels the workflow of the episode. Thread-safe.
        expires: when the keys of the episode expire, on the clock `time.monotonic`.
        thread: the id of the thread that the workflow runs in.
        context: the context of the workflow, in which its calls run. It tells an engine which episode a call is from.
        failure: the error that fails the episode, even if its agent has handled the HTTP error; None if there is none.
    """

    number: int
    tuner: ModelTuner
    cancel_workflow: Callable[[], object]
    expires: float
    thread: int
    context: contextvars.Context
    debug_models: list[DebugModel] = field(default_factory=list)
    failure: AstunerError | None = None
    is_closed: bool = False
    _open: dict[GatewayCall, None] = field(default_factory=dict)
    _delivered: deque[GatewayCall] = field(default_factory=deque)
    # By digest, the number of errors after which the client may retry the request.
    _retryable_errors: Counter[bytes] = field(default_factory=Counter)
    _calls_after_failure: int = 0
    _is_stopped: bool = False

    def find_retried(self, identity: RequestIdentity) -> GatewayCall | None:
        """Return the call that a request repeats; None if the request is new."""
        is_retry = identity.retry_count is not None and identity.retry_count > 0
        if is_retry and self._retryable_errors[identity.digest]:
            self._retryable_errors[identity.digest] -= 1
            return None
        now = time.monotonic()
        while self._delivered and self._delivered[0].delivered_at < now - _DELIVERED_SECONDS:
            self._delivered.popleft()
        same = [call for call in (*self._open, *self._delivered) if call.identity.digest == identity.digest]
        if identity.request_id:
            return next((call for call in same if call.identity.request_id == identity.request_id), None)
        if not is_retry:
            return None
        # Calls whose client has gone come first: an agent may send equal requests concurrently.
        return min(same, key=lambda call: (call.waiting > 0, call.is_delivered), default=None)

    def start(self, identity: RequestIdentity, chat: Coroutine[Any, Any, Answers]) -> GatewayCall:
        """Start a call that runs `chat`."""
        call = GatewayCall(asyncio.get_running_loop().create_task(chat, context=self.context.copy()), identity)
        self._open[call] = None
        return call

    def release(self, call: GatewayCall, *, is_delivered: bool) -> None:
        """End the wait of one HTTP request for a call.

        A call that no request waits for and whose answer has not been delivered is cut, after a while in which a retry
        may join it.
        """
        call.waiting -= 1
        if call.task.done() and (call.task.cancelled() or call.task.exception() is not None):
            self._open.pop(call, None)
            return
        if is_delivered and not call.is_delivered:
            call.is_delivered = True
            call.delivered_at = time.monotonic()
            self._open.pop(call, None)
            if call.identity.may_be_retried and not self.is_closed:
                self._delivered.append(call)
                if len(self._delivered) > _MAX_DELIVERED:
                    self._delivered.popleft()
        if call.waiting or call.is_delivered:
            return
        if call.identity.may_be_retried and not self.is_closed:
            asyncio.get_running_loop().call_later(_UNDELIVERED_SECONDS, self._cut, call)
        else:
            self._cut(call)

    def note_retryable_error(self, identity: RequestIdentity) -> None:
        """Note that a request gets an error after which its client may retry it."""
        self._retryable_errors[identity.digest] += 1

    def _cut(self, call: GatewayCall) -> None:
        if call.waiting or call.is_delivered or call not in self._open:
            return
        del self._open[call]
        if not call.task.done():
            call.task.cancel()
        elif not call.task.cancelled() and call.task.exception() is None:
            for answer in call.task.result():
                self.tuner.mark_cut(answer.call)

    def check_alive(self) -> None:
        """Raise AstunerError if the episode has failed or made too many calls; after several, cancel the workflow."""
        if self._is_stopped:
            # The workflow cannot be cancelled while its thread waits for the response, so it gets one.
            self.cancel_workflow()
            assert self.tuner.call_limit_error is not None
            raise self.tuner.call_limit_error
        if self.failure is None:
            return
        self._calls_after_failure += 1
        if self._calls_after_failure > _MAX_CALLS_AFTER_FAILURE:
            self.cancel_workflow()
        raise self.failure

    def note_error(self, error: BaseException) -> None:
        """Note the error of a call, and make the episode fail if its agent may not continue after it."""
        if isinstance(error, EpisodeError):
            self.tuner.rejection = error
        if isinstance(error, EpisodeStopped):
            self._is_stopped = True
            self.cancel_workflow()
        elif isinstance(error, AgentMadness) or not isinstance(error, EpisodeError | asyncio.CancelledError):
            known = isinstance(error, AstunerError)
            self.failure = error if known else WorkflowError(f"a model call failed: {error!r}")  # type: ignore[assignment]

    def cause_of(self, error: WorkflowError) -> AstunerError | None:
        """Return the model call's error that caused a workflow error; None if there is none.

        Thread-safe.

        Args:
            error: the error of the workflow. Its cause is the exception that the workflow raised; a program has none,
                and its error contains what it printed.
        """
        if self.failure is not None:
            return self.failure
        raised = error.__cause__ or error
        if self.tuner.rejection is not None and message_of(self.tuner.rejection) in text_of(raised):
            return self.tuner.rejection
        return None

    async def end(self) -> None:
        """Cut the calls that no client has received, and wait until they are recorded."""
        self.is_closed = True
        calls = list(self._open)
        for call in calls:
            call.waiting = 0
            self._cut(call)
        running = [call.task for call in calls if not call.task.done()]
        if running:
            await asyncio.wait(running, timeout=_UNDELIVERED_SECONDS)
        self._delivered.clear()
        self._retryable_errors.clear()
