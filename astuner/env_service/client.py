"""The client of the environment service."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import threading
import time
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from itertools import cycle
from typing import Any, TypeVar
from uuid import uuid4

import httpx
from loguru import logger
from pydantic import ValidationError

from astuner.env_service.addresses import TOKEN_VARIABLE, EnvServiceAddress
from astuner.env_service.protocol import (
    PROFILE,
    PROTOCOL_VERSION,
    CreatedInstance,
    CreateRequest,
    EnvTypeInfo,
    ErrorResponse,
    Health,
    TaskPage,
)
from astuner.env_service.remote_instance import RemoteInstance, instance_path, parsed
from astuner.errors import EnvError, first_line, shorten
from astuner.schema import EnvTask, TaskProfile
from astuner.system.loop_thread import LoopThread

T = TypeVar("T")

_MAX_CONNECTIONS = 512
_POOLS = 16
_CONNECT_SECONDS = 10.0
# The service answers within its time limit; the rest is for its queue and the network.
_EXTRA_SECONDS = 30.0
# The creation of the task lists; then the request, or the creation of the instance and its reset.
_GET_OPERATIONS = 2
_CREATE_OPERATIONS = 3
_FIRST_DELAY = 0.1
_MAX_DELAY = 5.0
_CLOSE_SECONDS = 5.0
# No instance is free, or the service ends and may be restarted.
_RETRIED_STATUS = (429, 503)


class ConnectionPools(httpx.AsyncBaseTransport):
    """Distributes requests over several connection pools.

    For each request, an httpcore pool visits all of its connections once per idle connection. With 128 connections in
    one pool, this takes longer than the rest of the request.

    Args:
        pools: number of pools.
        connections: maximum number of connections in all pools.
    """

    def __init__(self, pools: int, connections: int) -> None:
        context = httpx.create_ssl_context(trust_env=False)
        share = -(-connections // pools)
        limits = httpx.Limits(max_connections=share, max_keepalive_connections=share)
        self._pools = [httpx.AsyncHTTPTransport(verify=context, limits=limits, trust_env=False) for _ in range(pools)]
        self._turns = cycle(self._pools)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request with the pool whose turn it is."""
        return await next(self._turns).handle_async_request(request)

    async def aclose(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(pool.aclose() for pool in self._pools))


class EnvServiceClient:
    """A client of an environment service. Thread-safe; its methods can be awaited on any event loop.

    They raise `EnvError` if the service cannot be reached or rejects the request, or if the environment fails.

    Requests use the connections of one event loop in a daemon thread, which also sends the heartbeats. Requests are
    repeated after errors of the connection, and while the service has no free instance; the service performs a repeated
    request once.

    Args:
        retry_seconds: how long a request is repeated after errors of the connection.
        wait_seconds: how long the creation of an instance waits for a free one.
        transport: sends the requests, for example to a service in this process; None for connections to `address`.
    """

    def __init__(
        self,
        address: EnvServiceAddress,
        *,
        retry_seconds: float = 30.0,
        wait_seconds: float = 600.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.address = address
        self.client_id = uuid4().hex
        self._retry_seconds = retry_seconds
        self._wait_seconds = wait_seconds
        self._transport = transport
        self._lock = threading.Lock()
        self._loop: LoopThread | None = None
        self._http: httpx.AsyncClient | None = None
        self._health: Health | None = None
        self._heartbeat: asyncio.Task[None] | None = None
        self._instances: set[str] = set()
        self._pid = os.getpid()

    async def create(self, task: EnvTask, seed: int = 0, instance_id: str | None = None) -> RemoteInstance:
        """Create an instance and start its task.

        Args:
            seed: the seed for the randomness in the task's course.
            instance_id: the id of the instance; None for a new one.
        """
        return await asyncio.wrap_future(self.submit(self._create(task, seed, instance_id or uuid4().hex)))

    async def describe(self, source: EnvTask) -> EnvTypeInfo:
        """Return the splits and tools of an environment."""
        body = await asyncio.wrap_future(self.submit(self._get("/v1/env_type", _query(source))))
        return EnvTypeInfo.model_validate_json(body)

    def tasks(
        self, source: EnvTask, *, page: int = 100, count: int | None = None, with_reference: bool = False
    ) -> list[TaskProfile]:
        """Return the task profiles for the split `source.split`, in order. Blocks the calling thread.

        Args:
            source: the environment and the split.
            page: the number of tasks in a request.
            count: the number of tasks, from the first; None for all.
            with_reference: whether the profiles have the reference.
        """
        return self.submit(self._tasks(source, page, count, with_reference)).result()

    async def task(self, task: EnvTask, *, with_reference: bool = False) -> TaskProfile:
        """Return the profile of a task."""
        query = {**_query(task), "split": task.split, "task_id": task.task_id}
        query["with_reference"] = str(with_reference).lower()
        return parsed(PROFILE.validate_json, await asyncio.wrap_future(self.submit(self._get("/v1/task", query))))

    def release(self, instance_id: str) -> Future[None]:
        """Start to release an instance, also one whose creation has not finished. Never raises."""
        if self._loop is None or os.getpid() != self._pid:  # a client that is closed has no instances
            released: Future[None] = Future()
            released.set_result(None)
            return released
        return self.submit(self._release(instance_id))

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the event loop of the client.

        Raises:
            EnvError: the client is closed, or belongs to the parent of this process.
        """
        try:
            return self._started().submit(coroutine)
        except BaseException:
            coroutine.close()
            raise

    def close(self) -> None:
        """Release the instances of the client, and close its connections."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is None or os.getpid() != self._pid:
            return
        with contextlib.suppress(TimeoutError, EnvError):
            loop.submit(self._close()).result(_CLOSE_SECONDS)
        loop.close(_CLOSE_SECONDS)

    def _started(self) -> LoopThread:
        if os.getpid() != self._pid:
            raise EnvError(
                "the environment service's client belongs to this process's parent; use workflow_task.env in the "
                "workflow's process"
            )
        with self._lock:
            if self._loop is None:
                self._health = self._http = self._heartbeat = None
                self._loop = LoopThread("env client")
            return self._loop

    # The methods below run on the event loop of the client.

    async def _create(self, task: EnvTask, seed: int, instance_id: str) -> RemoteInstance:
        self._instances.add(instance_id)
        request = CreateRequest(
            instance_id=instance_id,
            client_id=self.client_id,
            env_type=task.env_type,
            params=dict(task.params),
            action_preference=task.action_preference,
            split=task.split,
            task_id=task.task_id,
            seed=seed,
        )
        try:
            health = await self._connected()
            if self._heartbeat is None:
                self._heartbeat = asyncio.create_task(self._send_heartbeats(health.lease_seconds / 3))
            body = await self.request("POST", "/v1/instances", request.model_dump(), operations=_CREATE_OPERATIONS)
            created = parsed(CreatedInstance.model_validate_json, body)
        except BaseException:
            # The service may have created it, for example if the caller was cancelled.
            self.release(instance_id)
            raise
        return RemoteInstance(self, instance_id, task.env_type, created)

    async def _tasks(self, source: EnvTask, page: int, count: int | None, with_reference: bool) -> list[TaskProfile]:
        found: list[TaskProfile] = []
        for offset in itertools.count(0, page):
            limit = page if count is None else min(page, count - offset)
            query = {**_query(source), "split": source.split, "offset": offset, "limit": limit, "profiles": "true"}
            body = await self._get("/v1/tasks", {**query, "with_reference": str(with_reference).lower()})
            listed = parsed(TaskPage.model_validate_json, body)
            found += listed.profiles
            if len(found) in (count, listed.total) or not listed.profiles:
                break
        return found

    async def _release(self, instance_id: str) -> None:
        if instance_id not in self._instances:
            return
        try:
            await self.request("DELETE", instance_path(instance_id))
        except EnvError as error:
            # The service releases it when the lease expires.
            logger.debug("instance {} could not be released: {}", instance_id, error)
        self._instances.discard(instance_id)

    async def _send_heartbeats(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            if self._instances and self._http is not None:
                # The next one repeats it.
                with contextlib.suppress(httpx.HTTPError):
                    await self._http.post(f"/v1/clients/{self.client_id}/heartbeat", timeout=seconds)

    async def _close(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        if self._http is None:
            return
        try:
            if self._instances:
                await self._http.delete(f"/v1/clients/{self.client_id}", timeout=_CLOSE_SECONDS / 2)
        except httpx.HTTPError as error:
            logger.debug("the instances of client {} could not be released: {}", self.client_id, first_line(error))
        self._instances.clear()
        await self._http.aclose()

    async def _get(self, path: str, query: Mapping[str, Any]) -> bytes:
        await self._connected()
        return await self.request("GET", path, query=query, operations=_GET_OPERATIONS)

    async def _connected(self) -> Health:
        """Return the limits of the service, which the first request reads."""
        if self._health is None:
            try:
                health = Health.model_validate_json(await self.request("GET", "/health"))
            except ValidationError as error:
                raise EnvError(
                    f"{self.address.url} is not an environment service (`astuner env serve`): {first_line(error)}"
                ) from error
            if health.protocol != PROTOCOL_VERSION:
                raise EnvError(
                    f"the environment service at {self.address.url} has version {health.protocol} of the protocol; "
                    f"this astuner has version {PROTOCOL_VERSION}. Install the same version of astuner for both"
                )
            self._health = health
        return self._health

    def _client(self) -> httpx.AsyncClient:
        if self._http is None:
            headers = {"Authorization": f"Bearer {self.address.token}"} if self.address.token else {}
            try:
                self._http = httpx.AsyncClient(
                    base_url=self.address.url,
                    # Without a proxy of the machine's settings, which would not lead to this machine.
                    transport=self._transport or ConnectionPools(_POOLS, _MAX_CONNECTIONS),
                    headers=headers,
                    trust_env=False,
                )
            except (httpx.InvalidURL, UnicodeError) as error:
                raise EnvError(f"the address of the environment service is invalid: {error}") from error
        return self._http

    async def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, Any] | None = None,
        *,
        operations: int = 1,
    ) -> bytes:
        """Send a request until the service answers it, and return the body. To be run with `submit`.

        Args:
            operations: how many operations with a time limit the request consists of in the service.

        Raises:
            EnvError: the service is gone, or answers with an error.
        """
        http, started, attempts = self._client(), time.monotonic(), 0
        content = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if body is not None else None
        seconds = _CONNECT_SECONDS if self._health is None else operations * self._health.step_timeout + _EXTRA_SECONDS
        timeout = httpx.Timeout(seconds, connect=_CONNECT_SECONDS, pool=None)
        while True:
            attempts += 1
            try:
                response = await http.request(
                    method, path, content=content, headers=headers, params=query, timeout=timeout
                )
            except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
                raise EnvError(f"{self.address.url!r} is no address such as http://127.0.0.1:8080: {error}") from error
            except httpx.LocalProtocolError as error:
                raise EnvError(f"{TOKEN_VARIABLE} is not a valid token: {error}") from None
            except httpx.TransportError as error:
                limit, failure = self._retry_seconds, f"cannot be reached ({first_line(error)})"
            else:
                if response.status_code < 400:
                    return response.content
                answered = self._error(response)
                if response.status_code not in _RETRIED_STATUS:
                    raise answered
                limit, failure = self._wait_seconds, f"answers: {answered}"
            waited = time.monotonic() - started
            delay = min(_FIRST_DELAY * 2 ** (attempts - 1), _MAX_DELAY) * random.uniform(0.5, 1.5)
            if waited + delay > limit:
                raise EnvError(
                    f"the environment service at {self.address.url} {failure}; {attempts} attempts in {waited:.0f} s. "
                    "Check that it runs (`astuner env serve`), and task_reader.env_service.env_url"
                )
            await asyncio.sleep(delay)

    def _error(self, response: httpx.Response) -> EnvError:
        try:
            info = ErrorResponse.model_validate_json(response.content).error
        except ValidationError:
            text = shorten(response.text)
            return EnvError(f"{self.address.url} answered with status {response.status_code}: {text}")
        error = EnvError(info.message)
        if info.traceback:
            error.add_note(f"In the environment service:\n{info.traceback}")
        return error


def _query(source: EnvTask) -> dict[str, Any]:
    return {
        "env_type": source.env_type,
        "params": json.dumps(dict(source.params)),
        "action_preference": source.action_preference,
    }
