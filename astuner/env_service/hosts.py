"""Starts the processes of environments and their task lists, and sends requests to them. Used on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
import socket
import subprocess
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import orjson
from pydantic import ValidationError

from astuner.env_service.host_process import REQUEST_HEADER, RESPONSE_HEADER, HostSettings, end_host
from astuner.env_service.protocol import EnvSource, EnvTypeInfo, ErrorInfo, ServiceRequestError
from astuner.errors import ServiceError, shorten
from astuner.system.child_process import start_module, wait_or_kill
from astuner.system.forking import ForkClient

_START_SECONDS = 120.0
_EXIT_SECONDS = 5.0
_EXIT_CODE_SECONDS = 30.0
_RELEASE_SECONDS = 2.0
_MAX_CATALOGS = 32
# The key of the object with the task lists; that of an instance is its id, which is not empty.
_TASKS_KEY = ""


class HostServer:
    """The process that forks hosts."""

    def __init__(self, settings: HostSettings) -> None:
        self._settings = settings
        self._client: ForkClient | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the process, and wait until it has imported the environments.

        Raises:
            ServiceError: it ends, or is not ready in time.
        """
        own, control = socket.socketpair()
        self._client = ForkClient(own)
        with control:
            self._process = start_module(
                "astuner.env_service.host_process",
                str(control.fileno()),
                # Some environments' tasks depend on the order of sets, and must be the same in every service.
                env={"PYTHONHASHSEED": "0"},
                stdin=subprocess.PIPE,
                pass_fds=(control.fileno(),),
            )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(json.dumps(asdict(self._settings)).encode())
        self._reading = asyncio.create_task(self._client.read())
        try:
            async with asyncio.timeout(_START_SECONDS):
                await self._client.ready.wait()
        except TimeoutError:
            raise ServiceError(f"the environments were not imported within {_START_SECONDS:g} s") from None
        if self._client.has_ended:
            raise ServiceError("the process that starts environments has ended; its output says why")

    async def new_host(self) -> Host:
        """Fork a host.

        Raises:
            ServiceRequestError: the process that forks has ended, or cannot fork.
        """
        assert self._client is not None
        service_end, host_end = socket.socketpair()
        try:
            with host_end:
                pid, exited = await self._client.fork(host_end.fileno())
        except BaseException as error:
            service_end.close()
            if isinstance(error, ConnectionError):
                reason = "the process that starts environments has ended; restart the environment service"
            elif isinstance(error, OSError):
                reason = (
                    f"the process of an instance could not be started: {error}. Lower --max-instances or the number of "
                    "episodes at a time (rollout.max_env_worker), or raise the limit of processes (ulimit -u)"
                )
            else:
                raise
            raise ServiceRequestError("process_ended", reason) from error
        reader, writer = await asyncio.open_connection(sock=service_end)
        return Host(pid, reader, writer, exited)

    async def wait(self) -> None:
        """Wait until the process has ended."""
        assert self._reading is not None
        await asyncio.wait([self._reading])

    async def close(self) -> None:
        """End the hosts and the process, and wait for it."""
        process = self._process
        if process is None:
            return
        assert self._client is not None
        with contextlib.suppress(ProcessLookupError):
            for pid in self._client.running:
                end_host(pid)
        self._client.close()
        if self._reading is not None:
            self._reading.cancel()
        await asyncio.to_thread(wait_or_kill, process, _EXIT_SECONDS)


_reading: set[asyncio.Task[None]] = set()


class Host:
    """A process with objects of one environment."""

    def __init__(
        self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, exited: asyncio.Future[int]
    ) -> None:
        self.pid = pid
        self._writer = writer
        self._exited = exited
        self._numbers = itertools.count(1)
        self._answers: dict[int, tuple[str, asyncio.Future[bytes]]] = {}
        self._end_reason: ServiceRequestError | None = None
        reading = asyncio.create_task(self._read(reader))
        # An event loop does not keep its tasks, and this one may outlive the last use of the host.
        _reading.add(reading)
        reading.add_done_callback(_reading.discard)

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended, or is being killed."""
        return self._end_reason is not None

    async def request(self, key: str, operation: str, timeout: float, **arguments: Any) -> bytes:
        """Call an object of the host, and return the result as JSON.

        Args:
            key: identifies the object.
            timeout: seconds.

        Raises:
            ServiceRequestError: the environment failed, the process has ended, or the time limit has passed.
        """
        if self._end_reason is not None:
            raise self._end_reason
        number = next(self._numbers)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._answers[number] = key, answer
        body = orjson.dumps({"number": number, "key": key, "op": operation, "arguments": arguments})
        self._writer.write(REQUEST_HEADER.pack(len(body)) + body)
        try:
            async with asyncio.timeout(timeout):
                return await answer
        except TimeoutError:
            raise ServiceRequestError("timeout", f"{operation} took longer than {timeout:g} s") from None
        finally:
            self._answers.pop(number, None)

    async def release(self, key: str, reason: ServiceRequestError) -> bool:
        """Close an object, whose requests fail with `reason`. Return whether the process still answers."""
        self._fail_answers(reason, key)
        try:
            await self.request(key, "release", _RELEASE_SECONDS)
        except ServiceRequestError as error:
            return error.info.code == "environment_error"
        return True

    def kill(self, reason: ServiceRequestError) -> None:
        """Kill the process and the processes that it has started. Its requests fail with `reason`."""
        if self._end_reason is None:
            self._end_reason = reason
        if not self._exited.done():
            end_host(self.pid)
        self._fail_answers(self._end_reason)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                size, number, is_ok = RESPONSE_HEADER.unpack(await reader.readexactly(RESPONSE_HEADER.size))
                body = await reader.readexactly(size)
                _, answer = self._answers.get(number, ("", None))
                if answer is None or answer.done():
                    continue
                if is_ok:
                    answer.set_result(body)
                else:
                    try:
                        info = ErrorInfo.model_validate_json(body)
                    except ValidationError as error:
                        text = f"the process of the environment sent no valid error: {error}"
                        info = ErrorInfo(code="environment_error", message=text)
                    answer.set_exception(ServiceRequestError(info.code, info.message, info.traceback))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writer.close()
            if self._end_reason is None:
                how = "closed its connection to the service"
                await asyncio.wait([self._exited], timeout=_EXIT_CODE_SECONDS)
                if self._exited.done() and not self._exited.cancelled():
                    code = self._exited.result()
                    how = f"ended with exit code {code}"
                    if code < 0:
                        how = f"was killed by signal {-code}"
                        with contextlib.suppress(ValueError):
                            how += f" ({signal.Signals(-code).name})"
                self._end_reason = ServiceRequestError("process_ended", f"the process of the environment {how}")
            if not self._exited.done():
                end_host(self.pid)
            self._fail_answers(self._end_reason)

    def _fail_answers(self, error: ServiceRequestError, of: str | None = None) -> None:
        """End the requests for one object, or for all."""
        for key, answer in self._answers.values():
            if not answer.done() and of in (None, key):
                answer.set_exception(error)


@dataclass(eq=False)
class Catalog:
    """An environment's task lists.

    Attributes:
        host: their process.
        info: the splits and tools.
        instances: the number of instances in the same process, if the environment is `is_async`.
    """

    host: Host
    info: EnvTypeInfo
    instances: int = 0


class Catalogs:
    """The catalogs of all environments with their parameters, each started when it is first needed.

    Args:
        env_types: the environments by the names under which clients know them.
        server: starts the processes.
        timeout: the time limit of a request, in seconds.
    """

    def __init__(self, env_types: Mapping[str, str], server: HostServer, timeout: float) -> None:
        self._env_types = env_types
        self._server = server
        self._timeout = timeout
        self._catalogs: OrderedDict[str, Catalog] = OrderedDict()
        self._locks: dict[str, asyncio.Lock] = {}

    async def get(self, source: EnvSource) -> Catalog:
        """Return the catalog of an environment.

        Raises:
            ServiceRequestError: the service does not have it, or it cannot be created.
        """
        self._env_type(source.env_type)
        key = json.dumps([source.env_type, source.params, source.action_preference], sort_keys=True)
        lock = self._locks.setdefault(key, asyncio.Lock())
        try:
            async with lock:
                catalog = self._catalogs.get(key)
                if catalog is None or catalog.host.has_ended:
                    host = await self._server.new_host()
                    try:
                        catalog = Catalog(host, await self.load(host, _TASKS_KEY, source))
                    except ServiceRequestError as error:
                        host.kill(error)
                        raise
                    self._catalogs[key] = catalog
        finally:
            if not lock.locked():
                self._locks.pop(key, None)
        self._catalogs.move_to_end(key)
        unused = [key for key, old in self._catalogs.items() if not old.instances and old is not catalog]
        if len(self._catalogs) > _MAX_CATALOGS and unused:
            dropped = ServiceRequestError("process_ended", "the task list was dropped to make room for others; retry")
            self._catalogs.pop(unused[0]).host.kill(dropped)
        return catalog

    async def ask(self, source: EnvSource, operation: str, **arguments: object) -> bytes:
        """Call `tasks` or `task`; return the result as JSON."""
        catalog = await self.get(source)
        try:
            return await catalog.host.request(_TASKS_KEY, operation, self._timeout, **arguments)
        except ServiceRequestError as error:
            if error.info.code == "timeout" and not catalog.instances:
                catalog.host.kill(error)
            raise

    def close(self, reason: ServiceRequestError) -> None:
        """End the processes. Their requests fail with `reason`."""
        for catalog in self._catalogs.values():
            catalog.host.kill(reason)

    async def load(self, host: Host, key: str, source: EnvSource) -> EnvTypeInfo:
        """Create an object of an environment in a host."""
        body = await host.request(
            key,
            "load",
            self._timeout,
            env_type=self._env_type(source.env_type),
            params=source.params,
            action_preference=source.action_preference,
        )
        return EnvTypeInfo.model_validate({"env_type": source.env_type, **json.loads(body)})

    def _env_type(self, name: str) -> str:
        """Return the environment that clients know as `name`."""
        if name in self._env_types:
            return self._env_types[name]
        family, slash, _ = name.partition("/")
        if slash and "->" not in name and f"{family}/*" in self._env_types:
            return name
        served = ", ".join(map(repr, self._env_types))
        raise ServiceRequestError(
            "unknown_env_type", f"the service has no environment {shorten(name)!r}; it serves {served} (--env)"
        )
