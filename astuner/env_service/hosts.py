"""Starts the processes of environments, and sends requests to them. Used on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
from pydantic import ValidationError

import astuner
from astuner.env_service.host_process import REQUEST_HEADER, RESPONSE_HEADER, HostSettings
from astuner.env_service.host_shutdown import end_host
from astuner.env_service.protocol import ErrorInfo, ServiceRequestError
from astuner.errors import ServiceError

_START_SECONDS = 120.0
_EXIT_SECONDS = 5.0
_EXIT_CODE_SECONDS = 30.0
_RELEASE_SECONDS = 2.0


class HostServer:
    """The process that forks hosts."""

    def __init__(self, settings: HostSettings) -> None:
        self._settings = settings
        self._numbers = itertools.count(1)
        # By the number of the request: the id of the new process, and its exit code to come.
        self._started: dict[int, asyncio.Future[tuple[int, asyncio.Future[int]]]] = {}
        self._exits: dict[int, asyncio.Future[int]] = {}
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the process, and wait until it has imported the environments.

        Raises:
            ServiceError: it ends, or is not ready in time.
        """
        self._control, control = socket.socketpair()
        package = str(Path(astuner.__file__).parents[1])
        python_path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        with control:
            self._process = subprocess.Popen(
                (sys.executable, "-P", "-m", "astuner.env_service.host_process", str(control.fileno())),
                # The tasks of some environments depend on the order of sets, and must be the same in every service.
                env={**os.environ, "PYTHONPATH": python_path, "PYTHONHASHSEED": "0"},
                stdin=subprocess.PIPE,
                pass_fds=(control.fileno(),),
            )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(json.dumps(asdict(self._settings)).encode())
        reader, writer = await asyncio.open_connection(sock=self._control.dup())
        try:
            async with asyncio.timeout(_START_SECONDS):
                if not await reader.readline():
                    raise ServiceError("the process that starts environments has ended; its output says why")
        except TimeoutError:
            raise ServiceError(f"the environments were not imported within {_START_SECONDS:g} s") from None
        self._reading = asyncio.create_task(self._read(reader, writer))

    async def new_host(self) -> Host:
        """Fork a host.

        Raises:
            ServiceRequestError: the process that forks has ended, or cannot fork.
        """
        assert self._control is not None
        assert self._reading is not None
        if self._reading.done():
            raise _no_fork_server()
        number = next(self._numbers)
        loop = asyncio.get_running_loop()
        started = self._started[number] = loop.create_future()
        own, other = socket.socketpair()
        with other:
            try:
                socket.send_fds(self._control, [REQUEST_HEADER.pack(number)], [other.fileno()])
            except OSError as error:
                own.close()
                raise _no_fork_server() from error
            try:
                pid, exited = await started
            except BaseException:
                own.close()
                raise
        reader, writer = await asyncio.open_connection(sock=own)
        return Host(pid, reader, writer, exited)

    async def wait(self) -> None:
        """Wait until the process has ended."""
        assert self._reading is not None
        await asyncio.wait([self._reading])

    async def close(self) -> None:
        """End the hosts and the process, and wait for it."""
        if self._control is not None:
            self._control.close()
        if self._reading is not None:
            self._reading.cancel()
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            for pid in self._exits:
                end_host(pid)
        try:
            await asyncio.to_thread(process.wait, _EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read what the process reports, until it ends."""
        loop = asyncio.get_running_loop()
        try:
            while line := await reader.readline():
                message: dict[str, Any] = json.loads(line)
                if "started" in message:
                    pid, started = message["pid"], self._started.pop(message["started"])
                    exited = self._exits[pid] = loop.create_future()
                    if not started.done():  # it is if its request was cancelled
                        started.set_result((pid, exited))
                elif "failed" in message:
                    started = self._started.pop(message["failed"])
                    if not started.done():
                        started.set_exception(_no_host(message["error"]))
                elif (ended := self._exits.pop(message["ended"], None)) is not None:
                    ended.set_result(message["code"])
        finally:
            writer.close()
            for started in self._started.values():
                if not started.done():
                    started.set_exception(_no_fork_server())


def _no_fork_server() -> ServiceRequestError:
    return ServiceRequestError(
        "process_ended", "the process that starts environments has ended; restart the environment service"
    )


def _no_host(reason: str) -> ServiceRequestError:
    return ServiceRequestError(
        "process_ended",
        f"the process of an instance could not be started: {reason}. Lower --max-instances or the number of episodes "
        "at a time (rollout.max_env_worker), or raise the limit of processes (ulimit -u)",
    )


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
            operation: the method.
            timeout: seconds.
            arguments: its arguments.

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
                    answer.set_exception(_request_error(body))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writer.close()
            if self._end_reason is None:
                self._end_reason = await self._unexpected_end()
            if not self._exited.done():
                end_host(self.pid)
            self._fail_answers(self._end_reason)

    async def _unexpected_end(self) -> ServiceRequestError:
        """Return the error for a process that has ended by itself."""
        how = "closed its connection to the service"
        with contextlib.suppress(TimeoutError):
            code = await asyncio.wait_for(asyncio.shield(self._exited), _EXIT_CODE_SECONDS)
            how = f"ended with exit code {code}" if code >= 0 else f"was killed by {_signal_name(-code)}"
        return ServiceRequestError("process_ended", f"the process of the environment {how}")

    def _fail_answers(self, error: ServiceRequestError, of: str | None = None) -> None:
        """End the requests for one object, or for all."""
        for key, answer in self._answers.values():
            if not answer.done() and of in (None, key):
                answer.set_exception(error)


def _request_error(body: bytes) -> ServiceRequestError:
    try:
        info = ErrorInfo.model_validate_json(body)
    except ValidationError as error:
        return ServiceRequestError("environment_error", f"the process of the environment sent no valid error: {error}")
    return ServiceRequestError(info.code, info.message, info.traceback)


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return f"signal {number} ({signal.Signals(number).name})"
    return f"signal {number}"
