"""The processes of environments, and the process that forks them.

`python -m astuner.env_service.host_process FD` imports the modules of the environments and forks a process for each
request on socket FD (see `hosts.py`, which sends them). The forked process, a host, has the objects for one instance,
or for all instances if the environment `is_async`, and for the task lists. It ends when its own socket is closed.

Messages to a host are a length and JSON. Messages from it are a length, the number of the request, 1 or 0 for success,
and JSON: the result, or an `ErrorInfo`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import json
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import orjson

from astuner.debugging.tracebacks import format_error
from astuner.env_service.environment import Environment, adapter, load_environment
from astuner.env_service.protocol import ServiceRequestError
from astuner.errors import AstunerError, WorkflowError, describe_error, short_repr
from astuner.plugin import load_object, raised_at
from astuner.schema import Evaluation, Observation, StepResult, TaskProfile, checked_reward
from astuner.system.forking import ReportingServer
from astuner.system.process_tree import adopt_orphans, child_pids

REQUEST_HEADER = struct.Struct("!I")
RESPONSE_HEADER = struct.Struct("!IIB")
_PR_SET_PDEATHSIG = 1
# Time to kill what is left when the service ends, in seconds.
_END_SECONDS = 5.0


@dataclass(frozen=True)
class HostSettings:
    """Settings of all hosts.

    Attributes:
        env_types: the environments to import before the first fork.
        search: the folders in which to search for `package.module->Class`.
        max_result_bytes: the maximum size of an observation or another result.
    """

    env_types: Sequence[str]
    search: Sequence[str]
    max_result_bytes: int


def main() -> None:
    """Fork hosts on request until the socket is closed; then kill them."""
    launcher, control = os.getppid(), socket.socket(fileno=int(sys.argv[1]))
    adopt_orphans()
    os.dup2(2, 1)  # what environments print is not output of the command that started this process
    data = json.loads(sys.stdin.buffer.read() or b"null")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the service ends this process
        signal.signal(number, signal.SIG_IGN)
    if data is not None:
        _ForkServer(HostSettings(**data), control, launcher).serve()


def end_host(pid: int) -> None:
    """Kill a host and the processes that its environment has started."""
    others = []
    for child in _descendants(pid):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(child) != pid:
                others.append(child)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    _kill_all(others)


def _kill_all(pids: Iterable[int]) -> None:
    """Kill processes, as far as they exist."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _descendants(pid: int) -> Iterator[int]:
    """Return the processes below a host. MCP servers have a group of their own."""
    for child in child_pids(pid):
        yield child
        yield from _descendants(child)


class _ForkServer(ReportingServer):
    def __init__(self, settings: HostSettings, control: socket.socket, launcher: int) -> None:
        self._settings = settings
        for env_type in settings.env_types:
            # A host reports what it cannot import.
            with contextlib.suppress(BaseException):
                if "->" in env_type:
                    load_object(env_type, search=[Path(folder) for folder in settings.search])
                else:
                    adapter(env_type.partition("/")[0])
        super().__init__(control, launcher)

    def serve(self) -> None:
        """Fork hosts until the service ends; then kill them."""
        super().serve()
        for pid in self.workers:
            end_host(pid)
        limit = time.monotonic() + _END_SECONDS
        # Processes whose host has ended become children of this process.
        while (left := list(_descendants(os.getpid()))) and time.monotonic() < limit:
            _kill_all(left)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(0.01)

    def fork(self) -> int:
        """Fork a host, whose group has its number."""
        pid = super().fork()
        if pid:
            with contextlib.suppress(OSError):  # the host does the same; whichever is first counts
                os.setpgid(pid, pid)
        return pid

    def run_worker(self, *descriptors: int) -> NoReturn:
        """Run a host with its socket."""
        for name in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(name, signal.SIG_DFL)
        _run_host(socket.socket(fileno=descriptors[0]), self._settings)

    def reap(self) -> None:
        """Kill what the hosts that have ended leave, and handle their ends."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                # Processes that it has started have the same group, whose id is not reused before the host is reaped.
                end_host(ended.si_pid)
                _, status = os.waitpid(ended.si_pid, 0)
                if ended.si_pid in self.workers:  # else a process that a host has left
                    self.workers.discard(ended.si_pid)
                    self.worker_ended(ended.si_pid, os.waitstatus_to_exitcode(status))


def _run_host(connection: socket.socket, settings: HostSettings) -> NoReturn:
    """Serve the requests of one connection, and exit."""
    code = 1
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        if sys.platform == "linux":
            # A host that hangs does not notice that its socket is closed.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        asyncio.run(_Host(settings).serve(connection))
        code = 0
    except BaseException as error:
        print(f"a process of an environment failed:\n{format_error(error)}", file=sys.stderr, flush=True)  # noqa: T201
    finally:
        with contextlib.suppress(BaseException):
            _kill_all(list(_descendants(os.getpid())))  # later, they are no descendants of this process
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


class _Host:
    def __init__(self, settings: HostSettings) -> None:
        self._settings = settings
        self._objects: dict[str, _Object] = {}
        self._tasks: dict[str, set[asyncio.Task[None]]] = {}

    async def serve(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                (size,) = REQUEST_HEADER.unpack(await reader.readexactly(REQUEST_HEADER.size))
                request = orjson.loads(await reader.readexactly(size))
                key = request["key"]
                if request["op"] == "release":
                    for task in self._tasks.pop(key, ()):
                        task.cancel()
                task = asyncio.create_task(self._answer(request, writer))
                running = self._tasks.setdefault(key, set())
                running.add(task)
                task.add_done_callback(running.discard)

    async def _answer(self, request: Mapping[str, Any], writer: asyncio.StreamWriter) -> None:
        try:
            body, is_ok = await self._handle(request), True
            limit = self._settings.max_result_bytes
            if len(body) > limit + _ENVELOPE_BYTES and request["op"] != "tasks":
                raise ServiceRequestError("too_large", f"the result of {request['op']} {_too_large(len(body), limit)}")
        except ServiceRequestError as error:
            body, is_ok = error.info.model_dump_json().encode(), False
        writer.write(RESPONSE_HEADER.pack(len(body), request["number"], is_ok))
        writer.write(body)
        await writer.drain()

    async def _handle(self, request: Mapping[str, Any]) -> bytes:
        key, operation, arguments = request["key"], request["op"], request["arguments"]
        if operation == "release":
            known = self._objects.pop(key, None)
            if known is not None:
                await known.call("close")
            self._tasks.pop(key, None)
            return b"null"
        if operation == "load":
            return self._load(key, **arguments)
        served = self._objects[key]
        return _to_json(await getattr(served, operation)(**arguments), operation)

    def _load(self, key: str, env_type: str, params: Mapping[str, Any], action_preference: str) -> bytes:
        search = [Path(folder) for folder in self._settings.search]
        with _reported(f"environment {env_type}"):
            environment = load_environment(env_type, params, search=search)
            environment.action_preference = action_preference  # type: ignore[assignment]
            info = {
                "splits": list(environment.splits()),
                "is_async": bool(environment.is_async),
                "tools": list(environment.tools),
            }
        self._objects[key] = _Object(environment, self._settings.max_result_bytes)
        return _to_json(info, "splits")


class _Object:
    """An environment object, with checks of what it returns."""

    def __init__(self, environment: Environment, limit: int) -> None:
        self._environment = environment
        self._limit = limit
        self._has_ended = False

    async def call(self, method: str, *arguments: Any) -> Any:
        with _reported(method):
            result = getattr(self._environment, method)(*arguments)
            return await result if inspect.isawaitable(result) else result

    async def tasks(self, split: str, offset: int, limit: int, profiles: bool, with_reference: bool) -> dict[str, Any]:
        ids = await self._task_ids(split)
        page = list(ids[offset : offset + limit])
        listed = [await self._profile(split, task_id, with_reference) for task_id in page] if profiles else []
        return {"total": len(ids), "task_ids": page, "profiles": listed}

    async def task(self, split: str, task_id: str, with_reference: bool) -> TaskProfile:
        await self._check_task(split, task_id)
        return await self._profile(split, task_id, with_reference)

    async def reset(self, split: str, task_id: str, seed: int) -> dict[str, Any]:
        await self._check_task(split, task_id)
        profile = await self._profile(split, task_id, with_reference=False)
        observation = await self.call("reset", split, task_id, seed)
        self._check_observation(observation, "reset returned")
        return {"profile": profile, "observation": observation, "tools": list(self._environment.tools)}

    async def step(self, action: Any) -> StepResult:
        if self._has_ended:
            raise ServiceRequestError("task_ended", "the task has ended, so the instance accepts no further action")
        result = await self.call("step", action)
        if not isinstance(result, StepResult):
            raise _invalid(f"step returned {short_repr(result)}; expected a StepResult")
        self._check_observation(result.observation, "step returned a StepResult with")
        reward = _checked_number(result.reward, "step returned the reward")
        self._has_ended = bool(result.is_done)
        return replace(result, reward=reward, is_done=self._has_ended, is_valid=bool(result.is_valid))

    async def evaluate(self) -> Evaluation:
        result = await self.call("evaluate")
        if not isinstance(result, Evaluation):
            raise _invalid(f"evaluate returned {short_repr(result)}; expected an Evaluation")
        success = None if result.is_success is None else bool(result.is_success)
        score = _checked_number(result.score, "evaluate returned the score")
        if score == {}:
            raise _invalid("evaluate returned no score; expected a number, or a number for each agent")
        return replace(result, score=score, is_success=success)

    async def _task_ids(self, split: str) -> Sequence[str]:
        splits = list(await self.call("splits"))
        if split not in splits:
            raise ServiceRequestError(
                "unknown_task", f"there is no split {split!r}; the splits are {', '.join(map(repr, splits)) or 'none'}"
            )
        ids: Sequence[str] = await self.call("task_ids", split)
        return ids

    async def _check_task(self, split: str, task_id: str) -> None:
        if task_id not in await self._task_ids(split):
            raise ServiceRequestError("unknown_task", f"split {split!r} has no task {short_repr(task_id)}")

    async def _profile(self, split: str, task_id: str, with_reference: bool) -> TaskProfile:
        profile = await self.call("profile", split, task_id)
        if not isinstance(profile, TaskProfile):
            raise _invalid(f"profile returned {short_repr(profile)}; expected a TaskProfile")
        return replace(profile, reference=await self.call("reference", split, task_id) if with_reference else None)

    def _check_observation(self, observation: object, subject: str) -> None:
        if not isinstance(observation, Observation) or not isinstance(observation.text, str):
            raise _invalid(f"{subject} {short_repr(observation)}; expected an Observation with a text")
        # Lone surrogates, which UTF-8 does not have, are rejected with the whole result.
        size = len(observation.text.encode(errors="surrogatepass"))
        if size > self._limit:
            raise ServiceRequestError("too_large", f"{subject} an observation that {_too_large(size, self._limit)}")


_ENVELOPE_BYTES = 64 * 1024


def _too_large(size: int, limit: int) -> str:
    return (
        f"is {size:,} bytes long; the limit of the service is {limit:,} bytes (--max-observation-bytes, or "
        "limits.max_observation_bytes of task_reader.env_service)"
    )


def _invalid(message: str) -> ServiceRequestError:
    return ServiceRequestError("invalid_result", message)


def _checked_number(value: object, subject: str) -> float | dict[str, float]:
    try:
        if isinstance(value, Mapping):
            return {str(name): checked_reward(number, "the reward") for name, number in value.items()}
        return checked_reward(value, "the reward")
    except WorkflowError:
        raise _invalid(f"{subject} {short_repr(value)}; expected a finite number") from None


@contextlib.contextmanager
def _reported(subject: str) -> Any:
    """Turn an exception of the environment's code into a `ServiceRequestError`."""
    try:
        yield
    except (ServiceRequestError, asyncio.CancelledError):
        raise
    except AstunerError as error:
        raise ServiceRequestError("environment_error", str(error), format_error(error)) from error
    # Whatever the code raises fails one request only, including SystemExit and KeyboardInterrupt.
    except BaseException as error:
        text = f"{subject} raised {describe_error(error)} (at {raised_at(error)})"
        raise ServiceRequestError("environment_error", text, format_error(error)) from error


def _to_json(value: object, operation: str) -> bytes:
    try:
        return orjson.dumps(value, default=_to_plain, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
    except (TypeError, ValueError) as error:
        raise _invalid(f"the result of {operation} cannot be written as JSON: {error}") from error


def _to_plain(value: object) -> object:
    """Return a JSON value for an object that JSON does not have; its `repr` as the last resort."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Mapping):
        return dict(value)
    for method in ("item", "tolist"):
        if callable(convert := getattr(value, method, None)):
            with contextlib.suppress(Exception):
                return convert()
    return list(value) if isinstance(value, set | frozenset | tuple) else short_repr(value)


if __name__ == "__main__":
    main()
