"""The main process's handle of a worker process: its messages, and the reason why it ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import re
import signal
import socket
import struct
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
from loguru import logger

from astuner.backbone.episode_workers.fork_server import ForkServer
from astuner.backbone.episode_workers.messages import (
    DISCONNECTED,
    AbandonEpisode,
    EpisodesEnded,
    FromWorker,
    GenerateAnswer,
    GenerateCancelled,
    GenerateRequest,
    JudgeGroup,
    LogRecord,
    ReportRequest,
    RunEpisode,
    ToWorker,
    WorkerReady,
)
from astuner.debugging.breakpoints import DebuggerQuit, add_reached_tags, is_debugged
from astuner.debugging.tracebacks import innermost_user_frame
from astuner.errors import AstunerError, BackboneError, EpisodeTimeout, ModelError, describe_error
from astuner.llm_engine.protocol import LlmEngine
from astuner.model_tuner.chat_options import CallSettings
from astuner.schema import Episode, LlmCall, WorkflowTask
from astuner.system.clock import timestamp
from astuner.system.process_tree import find_process
from astuner.system.redaction.redactor import learn_secrets
from astuner.task_rollout.active_episodes import RunningReport
from astuner.task_rollout.rollout import failed_episode

_START_SECONDS = 600.0
_SLOW_START_SECONDS = 30.0
_REPORT_SECONDS = 5.0
_EXIT_SECONDS = 2.0
_STACK_SECONDS = 0.3
_END_SECONDS = 5.0
# Ending the processes of an episode takes 2 seconds if they ignore SIGTERM.
_ABANDON_SECONDS = 5.0


class _ConnectionLostError(Exception):
    pass


@dataclass(frozen=True)
class _Lost:
    """Why a request has no result: the error's kind and text, and the stacks of all threads if known."""

    kind: str
    error: str
    stacks: str | None


@dataclass(eq=False)
class WorkerHandle:
    """The main process's handle of one worker process."""

    server: ForkServer
    name: str
    process: psutil.Process | None
    exit_code: asyncio.Future[int]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    crash_file: int
    _engine: LlmEngine | None = None
    _calls: list[LlmCall] = field(default_factory=list)
    _open: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    _is_serving: bool = False
    _report: asyncio.Future[RunningReport] | None = None

    @classmethod
    async def start(cls, server: ForkServer, number: int) -> WorkerHandle:
        """Start a worker and wait until it has loaded the agent; raise AstunerError if it cannot, or has ended."""
        own, other = socket.socketpair()
        with tempfile.TemporaryFile() as file:
            crash_file = os.dup(file.fileno())
        try:
            with other:
                pid, exit_code = await server.start_worker(other, crash_file)
        except BaseException:
            own.close()
            os.close(crash_file)
            raise
        reader, writer = await asyncio.open_unix_connection(sock=own)
        name, process = f"episode worker {number} (pid {pid})", find_process(pid)
        worker = cls(server, name, process, exit_code, reader, writer, crash_file)
        exit_code.add_done_callback(worker._close_soon)
        try:
            ready = await worker._loaded()
        except _ConnectionLostError as error:
            how = await worker._end_description() + _location(worker._stacks())
            worker.kill()
            raise BackboneError(f"{worker.name}, which imported the agent, {how}") from error
        except BaseException:
            worker.kill()
            raise
        if ready.error is not None:
            worker.kill()
            raise ready.error
        learn_secrets(ready.secrets)
        return worker

    async def _loaded(self) -> WorkerReady:
        """Wait until the process has loaded the agent; log where it is after half a minute."""
        receiving = asyncio.ensure_future(self._next())
        try:
            await asyncio.wait([receiving], timeout=None if is_debugged() else _SLOW_START_SECONDS)
            if not receiving.done():
                where, _ = await self._blocked_at()
                logger.warning(
                    "{} has been importing the agent for {:g} s; it is {}", self.name, _SLOW_START_SECONDS, where
                )
                await asyncio.wait([receiving], timeout=_START_SECONDS - _SLOW_START_SECONDS)
            if not receiving.done():
                where, _ = await self._blocked_at()
                raise BackboneError(
                    f"{self.name} has not imported the agent within {_START_SECONDS:g} s; it is {where}. Load what "
                    "takes long in `execute`, or before the run"
                )
            ready = await receiving
        finally:
            receiving.cancel()
        assert isinstance(ready, WorkerReady)
        return ready

    def _close_soon(self, exit_code: asyncio.Future[int]) -> None:
        # A fork of an episode may keep the connection open. What the process has sent is read first.
        if not exit_code.cancelled():
            asyncio.get_running_loop().call_later(_STACK_SECONDS, self.writer.close)

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the episode has sampled, in ended calls."""
        return sum(len(call.completion_ids) for call in list(self._calls))

    @property
    def is_lost(self) -> bool:
        """Whether the process has ended, or has closed its connection."""
        return self.exit_code.done() or self.reader.at_eof() or self.writer.is_closing()

    async def run(
        self, engine: LlmEngine, task: WorkflowTask, settings: CallSettings, deadline: float | None
    ) -> Episode:
        """Run one episode. If the process ends, or `deadline` seconds have passed, the episode is `failed`.

        DebuggerQuit: the user quit the debugger.
        """
        started = timestamp()
        self._engine, self._calls = engine, []
        request = RunEpisode(task, settings, engine.policy_version, engine.max_model_len)
        ended = await self._ended(request, deadline, "ran this episode", task.episode_id)
        if isinstance(ended, _Lost):
            failed = failed_episode(task, tuple(self._calls), ended.kind, ended.error, started)
            return replace(failed, error_traceback=ended.stacks)
        return replace(ended[0], task=task.task)

    async def judge(
        self, tasks: Sequence[WorkflowTask], episodes: Sequence[Episode], deadline: float | None
    ) -> list[Episode]:
        """Judge the episodes of one task, which are `failed` if the process ends, or after `deadline` seconds.

        Raises as `run`.
        """
        ended = await self._ended(JudgeGroup(tasks, episodes), deadline, "judged these episodes", None)
        if isinstance(ended, _Lost):
            return [
                replace(episode, error_kind=ended.kind, error=ended.error, error_traceback=ended.stacks)
                for episode in episodes
            ]
        return [replace(episode, task=task.task) for episode, task in zip(ended, tasks, strict=True)]

    async def _ended(
        self, request: RunEpisode | JudgeGroup, deadline: float | None, did: str, episode_id: str | None
    ) -> Sequence[Episode] | _Lost:
        started = time.monotonic()
        self._send(request)
        self._is_serving = True
        try:
            try:
                async with asyncio.timeout(deadline):
                    ended = await self._until_ended(episode_id)
            except TimeoutError:
                self._send(AbandonEpisode())
                async with asyncio.timeout(_ABANDON_SECONDS):
                    ended = await self._until_ended(episode_id)
                self.kill()  # its thread is blocked
        except TimeoutError:  # C code blocks the interpreter
            where, stacks = await self._blocked_at()
            self.kill()
            seconds = f"{time.monotonic() - started:.0f} s"
            error = f"the episode blocked {self.name} for {seconds}, which was killed and replaced; it was {where}"
            return _Lost(EpisodeTimeout.kind, error, stacks)
        except _ConnectionLostError:
            how = await self._end_description()
            stacks = self._stacks()
            self.kill()
            error = f"{self.name}, which {did}, {how}{_location(stacks)}; it is replaced"
            return _Lost("worker", error, stacks or None)
        finally:
            for call in self._open.values():
                call.cancel()
            self._is_serving = False  # nobody reads the messages of the process until its next request
            if self._report is not None and not self._report.done():
                self._report.set_result(RunningReport(0, ()))
        add_reached_tags(ended.reached)
        if ended.episodes:
            return ended.episodes
        if ended.error is None:
            raise DebuggerQuit
        self.kill()  # the episode may have replaced what astuner uses, such as functions of a library
        return _Lost("worker", f"{self.name}, which {did}, failed in astuner: {ended.error}; it is replaced", None)

    async def _until_ended(self, episode_id: str | None) -> EpisodesEnded:
        while True:
            match await self._next():
                case EpisodesEnded() as ended:
                    return ended
                case GenerateRequest() as request:
                    self._open[request.number] = asyncio.ensure_future(self._generate(request))
                case GenerateCancelled(number):
                    if (call := self._open.get(number)) is not None:
                        call.cancel()
                case LlmCall() as call_record:
                    if call_record.episode_id == episode_id:  # not of a thread that an earlier episode has left
                        self._calls.append(call_record)
                case LogRecord(level, text):
                    logger.log(level, "{}", text)
                case RunningReport() as report:
                    if self._report is not None and not self._report.done():
                        self._report.set_result(report)

    async def _generate(self, request: GenerateRequest) -> None:
        try:
            assert self._engine is not None
            result: Any = await self._engine.generate(request.prompt_ids, request.params)
        except AstunerError as error:
            result = error
        except Exception as error:  # the episode must not wait forever
            result = ModelError(f"the engine raised {describe_error(error)}")
        finally:
            self._open.pop(request.number, None)
        self._send(GenerateAnswer(request.number, result))

    def _send(self, message: ToWorker) -> None:
        frame = pickle.dumps(message)
        self.writer.write(struct.pack("!i", len(frame)) + frame)

    async def _next(self) -> FromWorker:
        """Return the next message."""
        try:
            (size,) = struct.unpack("!i", await self.reader.readexactly(4))
            message: FromWorker = pickle.loads(await self.reader.readexactly(size))
        except (asyncio.IncompleteReadError, OSError, ValueError) as error:
            raise _ConnectionLostError from error
        # The episode may have written to the connection.
        except Exception as error:
            logger.debug("{} sent invalid data: {}", self.name, describe_error(error))
            raise _ConnectionLostError from error
        return message

    async def report(self) -> RunningReport:
        """Return what the episode is doing."""
        if not self._is_serving:
            return RunningReport(0, ())
        self._report = asyncio.get_running_loop().create_future()
        self._send(ReportRequest())
        try:
            return await asyncio.wait_for(self._report, _REPORT_SECONDS)
        except TimeoutError:
            where, _ = await self._blocked_at()
            text = f"{self.name} did not answer within {_REPORT_SECONDS:g} s: C code blocks its interpreter; it is"
            return RunningReport(1, (f"{text} {where}",))

    async def _end_description(self) -> str:
        try:
            code = await asyncio.wait_for(asyncio.shield(self.exit_code), _EXIT_SECONDS)
        except TimeoutError:
            return "closed its connection to the main process"
        except asyncio.CancelledError:
            if not self.server.has_ended:
                raise
            return "ended"
        if code == DISCONNECTED:
            return "closed its connection to the main process"
        if code >= 0:
            return f"exited with code {code}: its code must not end the process"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else "unknown"
        memory = "; Linux sends it when memory runs out" if -code == signal.SIGKILL else ""
        return f"was ended by signal {-code} ({name}{memory})"

    async def _blocked_at(self) -> tuple[str, str]:
        """Return where the episode is, to follow `it was`, and the stacks of all threads."""
        known = len(self._stacks())
        with contextlib.suppress(psutil.Error):
            if self.process is not None:
                self.process.send_signal(signal.SIGUSR1)
        await asyncio.sleep(_STACK_SECONDS)
        stacks = self._stacks()[known:]
        return _location(stacks).removeprefix(" ") or "at an unknown place", stacks

    def _stacks(self) -> str:
        size = os.fstat(self.crash_file).st_size
        return os.pread(self.crash_file, size, 0).decode(errors="replace")

    def kill(self) -> None:
        """Kill the process."""
        with contextlib.suppress(psutil.Error):
            if self.process is not None:
                self.process.kill()
        self.close()

    def end(self) -> None:
        """Let the process release what its episode uses, and kill it if it has not ended in time."""
        self.close()
        asyncio.get_running_loop().call_later(_END_SECONDS, self.kill)

    def close(self) -> None:
        """Close the connection, after which the process ends."""
        self.writer.close()
        if self.crash_file >= 0:
            os.close(self.crash_file)
            self.crash_file = -1


def _location(stacks: str) -> str:
    """Return ` at FILE:LINE, in FUNCTION` of the user's code in the stacks that faulthandler has written, or ""."""
    threads = []
    for block in re.split(r"^(?=(?:Current t|T)hread 0x)", stacks, flags=re.MULTILINE):
        frames = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', block, flags=re.MULTILINE)
        stack = [traceback.FrameSummary(file, int(line), name, lookup_line=False) for file, line, name in frames][::-1]
        threads.append((block.startswith("Current"), innermost_user_frame(stack)))
    for _, frame in sorted(threads, key=lambda thread: not thread[0]):
        if frame is not None:
            return f" at {frame.filename}:{frame.lineno}, in {frame.name}"
    return ""
