"""The instances of the environment service: creation, steps, evaluation, release, leases and limits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from loguru import logger

from astuner.env_service.host_process import HostSettings
from astuner.env_service.hosts import Catalog, Catalogs, Host, HostServer
from astuner.env_service.protocol import (
    CreateRequest,
    EnvSource,
    EnvTypeInfo,
    InstanceInfo,
    ServiceRequestError,
    StepRequest,
)
from astuner.errors import shorten

_SWEEP_SECONDS = 0.5
_MAX_RELEASED = 10_000
# The results of this many steps are kept for repeated requests.
_KEPT_RESULTS = 16


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """Limits of an environment service.

    Attributes:
        max_instances: the maximum number of instances.
        idle_seconds: the time without a request after which an instance is released.
        lease_seconds: the time after the last heartbeat of a client after which its instances are released.
        step_timeout: the time limit of a reset, a step or an evaluation, in seconds.
        max_observation_bytes: the maximum size of an observation in UTF-8.
    """

    max_instances: int = 128
    idle_seconds: float = 600.0
    lease_seconds: float = 30.0
    step_timeout: float = 60.0
    max_observation_bytes: int = 2**20


@dataclass(eq=False)
class _Instance:
    """A running instance.

    Attributes:
        lock: held by the request that is handled.
        host: its process; None before it is started, and after it has ended.
        catalog: its environment's catalog if the instance shares its process, else None.
        created: the response to `request`.
        failure: why it is useless.
        steps: the number of steps so far.
        results: the requests and results of the last steps, by their index.
        last_used: the time of the last request.
        running: the number of requests that are handled or wait.
    """

    request: CreateRequest
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    host: Host | None = None
    catalog: Catalog | None = None
    created: bytes | None = None
    failure: ServiceRequestError | None = None
    steps: int = 0
    results: OrderedDict[int, tuple[StepRequest, bytes]] = field(default_factory=OrderedDict)
    last_used: float = field(default_factory=time.monotonic)
    running: int = 0


class InstanceTable:
    """The instances and their processes. Used on one event loop.

    Args:
        env_types: the environments by the names under which clients know them; `FAMILY/*` is a whole family.
        search: the folders in which to search for `package.module->Class`.
    """

    def __init__(self, env_types: Mapping[str, str], search: tuple[str, ...], limits: ServiceLimits) -> None:
        self.env_types = env_types
        self.limits = limits
        self._server = HostServer(HostSettings(tuple(env_types.values()), search, limits.max_observation_bytes))
        self._instances: dict[str, _Instance] = {}
        self._released: OrderedDict[str, str] = OrderedDict()
        self._clients: dict[str, float] = {}
        self._catalogs = Catalogs(env_types, self._server, limits.step_timeout)
        self._sweeper: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def start(self) -> None:
        """Import the environments.

        Raises:
            ServiceError: the process that does so does not start.
        """
        await self._server.start()
        self._sweeper = asyncio.create_task(self._sweep())

    async def close(self) -> None:
        """End all instances and processes. May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        closing = [self.release(instance_id, "the service has ended") for instance_id in list(self._instances)]
        await asyncio.gather(*closing, *self._ending)
        self._catalogs.close(ServiceRequestError("shutting_down", "the service has ended"))
        await self._server.close()

    async def wait(self) -> None:
        """Wait until the process that starts environments has ended. The table is useless then."""
        await self._server.wait()

    @property
    def count(self) -> int:
        """The number of instances."""
        return len(self._instances)

    def list_instances(self) -> list[InstanceInfo]:
        """Return the instances."""
        now = time.monotonic()
        return [
            InstanceInfo(
                instance_id=instance.request.instance_id,
                client_id=instance.request.client_id,
                env_type=instance.request.env_type,
                split=instance.request.split,
                task_id=instance.request.task_id,
                steps=instance.steps,
                idle_seconds=0.0 if instance.running else now - instance.last_used,
                pid=0 if instance.host is None else instance.host.pid,
            )
            for instance in self._instances.values()
        ]

    async def describe(self, source: EnvSource) -> EnvTypeInfo:
        """Return an environment's splits and tools; ServiceRequestError if it cannot be loaded."""
        self._check_open()
        return (await self._catalogs.get(source)).info

    async def ask_catalog(self, source: EnvSource, operation: str, **arguments: object) -> bytes:
        """Call `tasks` or `task` in the process that holds an environment's tasks."""
        self._check_open()
        return await self._catalogs.ask(source, operation, **arguments)

    def renew(self, client_id: str) -> None:
        """Note that a client is alive."""
        self._clients[client_id] = time.monotonic()

    async def create(self, request: CreateRequest) -> bytes:
        """Create an instance and start its task; return a `CreatedInstance` as JSON.

        Raises:
            ServiceRequestError: the environment or task does not exist or fails, or there are too many instances.
        """
        self._check_open()
        if request.instance_id in self._released:
            raise self._was_released(request.instance_id)
        instance = self._instances.get(request.instance_id)
        if instance is None:
            if self.count >= self.limits.max_instances:
                raise ServiceRequestError(
                    "too_many_instances",
                    f"the service has {self.count} instances, the maximum (--max-instances); release one, or retry",
                )
            instance = self._instances[request.instance_id] = _Instance(request)
        elif instance.request != request:
            raise ServiceRequestError(
                "conflict", f"instance {request.instance_id} exists, with another task; choose another instance_id"
            )
        self.renew(request.client_id)
        async with self._used(instance):
            if instance.created is None:
                try:
                    instance.created = await self._start(instance)
                except ServiceRequestError as error:
                    # The same error for a repeated request, without a reset that may have another result.
                    self._end(request.instance_id, f"it could not be created: {error}")
                    raise
            return instance.created

    async def step(self, instance_id: str, request: StepRequest) -> bytes:
        """Perform a step, or return the result of the same step; the result is a `StepResult` as JSON."""
        instance = self._instance(instance_id)
        async with self._used(instance):
            if instance.failure is not None:
                raise instance.failure
            if (known := instance.results.get(request.index)) is not None:
                if known[0] != request:
                    raise ServiceRequestError("conflict", f"step {request.index} was performed with another action")
                return known[1]
            if request.index != instance.steps:
                raise ServiceRequestError(
                    "conflict", f"the next step of the instance is {instance.steps}, not {request.index}"
                )
            result = await self._request(instance, "step", action=request.action)
            instance.results[request.index] = (request, result)
            instance.steps += 1
            if len(instance.results) > _KEPT_RESULTS:
                instance.results.popitem(last=False)
            return result

    async def evaluate(self, instance_id: str) -> bytes:
        """Return the score of an instance, an `Evaluation` as JSON."""
        instance = self._instance(instance_id)
        async with self._used(instance):
            if instance.failure is not None:
                raise instance.failure
            return await self._request(instance, "evaluate")

    async def release(self, instance_id: str, reason: str = "its client released it") -> None:
        """End an instance, if it exists. Its requests fail."""
        if (ending := self._end(instance_id, reason)) is not None:
            await asyncio.shield(ending)

    async def release_client(self, client_id: str) -> None:
        """End the instances of a client."""
        self._clients.pop(client_id, None)
        ids = [key for key, instance in self._instances.items() if instance.request.client_id == client_id]
        await asyncio.gather(*(self.release(instance_id) for instance_id in ids))

    def _instance(self, instance_id: str) -> _Instance:
        self._check_open()
        instance = self._instances.get(instance_id)
        if instance is None:
            raise self._was_released(instance_id)
        self.renew(instance.request.client_id)
        return instance

    def _was_released(self, instance_id: str) -> ServiceRequestError:
        reason = self._released.get(instance_id)
        how = f"was released: {reason}" if reason else "does not exist; the service may have been restarted"
        return ServiceRequestError("unknown_instance", f"instance {shorten(instance_id)} {how}")

    def _check_open(self) -> None:
        if self._is_closed:
            raise ServiceRequestError("shutting_down", "the service is ending")

    @contextlib.asynccontextmanager
    async def _used(self, instance: _Instance) -> AsyncIterator[None]:
        """Use an instance, after the requests before; it does not become idle meanwhile."""
        instance.running += 1
        try:
            async with instance.lock:
                yield
        finally:
            instance.running -= 1
            instance.last_used = time.monotonic()

    async def _start(self, instance: _Instance) -> bytes:
        request = instance.request
        catalog = await self._catalogs.get(request)
        key = request.instance_id
        if catalog.info.is_async:
            instance.catalog = catalog
            catalog.instances += 1
            instance.host = catalog.host
        else:
            instance.host = await self._server.new_host()
        if self._instances.get(key) is not instance:
            await self._end_host(instance)
            raise self._was_released(key)
        await self._catalogs.load(instance.host, key, request)
        body = await self._request(instance, "reset", split=request.split, task_id=request.task_id, seed=request.seed)
        return b'{"instance_id":' + json.dumps(key).encode() + b"," + body[1:]

    async def _request(self, instance: _Instance, operation: str, **arguments: object) -> bytes:
        """Send a request to an instance. After an error of `step` and after a timeout, the instance is useless."""
        host, key = instance.host, instance.request.instance_id
        if host is None:
            raise self._was_released(key)
        try:
            return await host.request(key, operation, self.limits.step_timeout, **arguments)
        except ServiceRequestError as error:
            code = error.info.code
            if code == "timeout":
                keys = "--step-timeout, or limits.step_timeout of task_reader.env_service"
                error.info.message += f" ({keys}); the service has ended the instance"
                await self._end_host(instance)
            if code != "task_ended" and (operation == "step" or code in ("timeout", "process_ended")):
                instance.failure = error
            raise

    def _end(self, instance_id: str, reason: str) -> asyncio.Task[None] | None:
        """Start to end an instance, if it exists."""
        instance = self._instances.pop(instance_id, None)
        self._released[instance_id] = reason
        if len(self._released) > _MAX_RELEASED:
            self._released.popitem(last=False)
        if instance is None:
            return None
        ending = asyncio.create_task(self._end_host(instance))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        return ending

    async def _end_host(self, instance: _Instance) -> None:
        """End the process of an instance. A process with other instances is ended only if this one blocks it."""
        host, catalog, key = instance.host, instance.catalog, instance.request.instance_id
        instance.host = instance.catalog = None
        if host is None:
            return
        reason = self._was_released(key)
        if catalog is None:
            if not instance.running:
                await host.release(key, reason)
            host.kill(reason)
            return
        catalog.instances -= 1
        if not await host.release(key, reason):
            text = "the process of the environment was ended, because one of its instances blocked it"
            host.kill(ServiceRequestError("process_ended", text))

    async def _sweep(self) -> None:
        """Release the instances of dead clients and idle instances."""
        limits = self.limits
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            now = time.monotonic()
            for client_id, seen in list(self._clients.items()):
                if now - seen > limits.lease_seconds:
                    del self._clients[client_id]
                    owned = [key for key, i in self._instances.items() if i.request.client_id == client_id]
                    reason = f"its client sent no heartbeat for {limits.lease_seconds:g} s (--lease-seconds)"
                    if owned:
                        logger.warning("{} instances of client {} are released: {}", len(owned), client_id, reason)
                    for instance_id in owned:
                        self._end(instance_id, reason)
            for instance_id, instance in list(self._instances.items()):
                if not instance.running and now - instance.last_used > limits.idle_seconds:
                    reason = f"it was idle for {limits.idle_seconds:g} s (--idle-seconds)"
                    logger.warning("instance {} is released: {}", shorten(instance_id), reason)
                    self._end(instance_id, reason)
