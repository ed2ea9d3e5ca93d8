"""A process that runs episodes, one at a time.

The workflow and the judge run here. LLM calls go through a socket to the main process, which has the engine. A frame of
the socket is its length (4 bytes, big-endian) and a pickled message.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import itertools
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from loguru import logger

from astuner.backbone.episode_workers.worker import AgentJob, EpisodeWorker, LogRecord, as_log_record
from astuner.debugging.breakpoints import DebuggerQuit, reached_tags
from astuner.errors import AstunerError, describe_error
from astuner.model_tuner import CallSettings, ChatCodec
from astuner.processes.episode_processes import end_all_episodes
from astuner.schema import Completion, Episode, LlmCall, SamplingParams, WorkflowTask
from astuner.system.forking import name_process
from astuner.task_rollout import RunningReport

# If memory runs out, the kernel kills this process before the main process, which has the model.
_OOM_SCORE = 500
DISCONNECTED = 113
"""Exit code of a worker whose episode has closed the connection to the main process."""


@dataclass(frozen=True)
class RunEpisode:
    """To the worker: run an episode.

    Attributes:
        task, settings: of the episode.
        policy_version: version of the engine's weights.
        max_model_len: maximum number of tokens of a request to the engine.
    """

    task: WorkflowTask
    settings: CallSettings
    policy_version: int
    max_model_len: int


@dataclass(frozen=True)
class JudgeGroup:
    """To the worker: judge the episodes of one task, each with its task."""

    tasks: Sequence[WorkflowTask]
    episodes: Sequence[Episode]


@dataclass(frozen=True)
class ReportRequest:
    """To the worker: send a `RunningReport`."""


@dataclass(frozen=True)
class GenerateAnswer:
    """To the worker: the result of the `GenerateRequest` with this number."""

    number: int
    result: Completion | AstunerError


@dataclass(frozen=True)
class GenerateRequest:
    """From the worker: sample a completion. See `LlmEngine.generate`."""

    number: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True)
class GenerateCancelled:
    """From the worker: the `GenerateRequest` with this number needs no answer."""

    number: int


@dataclass(frozen=True)
class WorkerReady:
    """From the worker: the agent is loaded, or cannot be.

    Attributes:
        secrets: the environment variables that contain secrets.
        error: why the agent cannot be loaded.
    """

    secrets: dict[str, str]
    error: AstunerError | None = None


@dataclass(frozen=True)
class EpisodesEnded:
    """From the worker: the episode of `RunEpisode` has ended, or those of `JudgeGroup` are judged.

    Attributes:
        episodes: the episodes; none if the user quit the debugger, or astuner failed.
        reached: the tags of the `bp(tag)` calls that the process has reached.
        error: the traceback of a failure of astuner.
    """

    episodes: Sequence[Episode]
    reached: frozenset[str]
    error: str | None = None


ToWorker = RunEpisode | JudgeGroup | ReportRequest | GenerateAnswer
FromWorker = WorkerReady | GenerateRequest | GenerateCancelled | LlmCall | LogRecord | RunningReport | EpisodesEnded


class _MainProcess:
    """The connection to the main process. Any thread may send."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._inode = os.fstat(connection.fileno()).st_ino
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def send(self, message: FromWorker) -> None:
        """Send a message.

        Raises:
            Exception: it cannot be pickled.
        """
        if os.getpid() != self._pid:  # a fork of the process has inherited the connection
            return
        frame = pickle.dumps(message)
        with self._lock:
            try:
                self._check()
                self._connection.send_bytes(frame)
            except OSError:
                os._exit(DISCONNECTED)

    def receive(self) -> ToWorker:
        """Wait for the next message.

        Raises:
            EOFError: the main process has closed the connection, or has ended.
            OSError: the episode has closed the connection.
        """
        self._check()
        message: ToWorker = self._connection.recv()
        return message

    def _check(self) -> None:
        """Check that the descriptor is still the connection, and not a file that the episode has opened."""
        if os.fstat(self._connection.fileno()).st_ino != self._inode:
            raise OSError("the connection to the main process was closed")


class EngineClient:
    """The `LlmEngine` of a worker process: the engine of the main process."""

    def __init__(self, main_process: _MainProcess) -> None:
        self.max_model_len = 0
        self.policy_version = 0
        self._main_process = main_process
        self._numbers = itertools.count()
        self._pending: dict[int, asyncio.Future[Completion]] = {}

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """Sample one completion (see `LlmEngine.generate`)."""
        number = next(self._numbers)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._pending[number] = future
        try:
            self._main_process.send(GenerateRequest(number, tuple(prompt_ids), params))
            return await future
        finally:
            if self._pending.pop(number, None) is not None:
                self._main_process.send(GenerateCancelled(number))

    def set_result(self, answer: GenerateAnswer) -> None:
        """Pass an answer to the call that waits for it. Thread-safe."""
        future = self._pending.pop(answer.number, None)
        if future is not None:
            with contextlib.suppress(RuntimeError):  # its event loop is closed
                future.get_loop().call_soon_threadsafe(_settle, future, answer.result)

    def close(self) -> None:
        """Do nothing: the main process owns the engine."""


def _settle(future: asyncio.Future[Completion], result: Completion | AstunerError) -> None:
    if future.done():
        return
    if isinstance(result, AstunerError):
        future.set_exception(result)
    else:
        future.set_result(result)


def serve(job: AgentJob, codec: ChatCodec, connection: int, crash_file: int) -> NoReturn:
    """Run episodes until the main process closes the connection, then end this process.

    Args:
        job: the agent.
        codec: the codec of the run's model.
        connection: descriptor of the socket.
        crash_file: descriptor of a file for the stacks of all threads. They are written if a signal such as SIGSEGV
            ends the process, and on SIGUSR1, even while C code blocks the interpreter.
    """
    _prepare_process(crash_file)
    main_process = _MainProcess(Connection(connection))
    engine = EngineClient(main_process)
    try:
        worker = _load(job, engine, codec, main_process)
        if worker is not None:
            _serve_requests(worker, engine, main_process)
    except EOFError:
        end_all_episodes()
        _flush()
    except OSError:
        os._exit(DISCONNECTED)
    finally:
        os._exit(0)  # threads of episodes may never end


def _prepare_process(crash_file: int) -> None:
    name_process("astuner-worker")
    os.setsid()  # signals to the process group of an episode reach this process only
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    with contextlib.suppress(OSError):  # not on macOS
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))
    faulthandler.enable(crash_file)
    faulthandler.register(signal.SIGUSR1, crash_file)
    # A fork has its parent's random state. Python gives its own generator a new one.
    random: Any = sys.modules.get("numpy.random")
    if random is not None:
        random.seed()
    sys.breakpointhook = _reject_breakpoint


def _reject_breakpoint(*_args: object, **_options: object) -> NoReturn:
    raise RuntimeError(
        "breakpoint() needs the terminal, which a worker process of rollout.isolation: process does not have; set "
        "rollout.isolation: thread, or write astuner.bp('TAG') and run with --db=TAG"
    )


def _load(job: AgentJob, engine: EngineClient, codec: ChatCodec, main_process: _MainProcess) -> EpisodeWorker | None:
    try:
        worker = EpisodeWorker(job, engine, codec, main_process.send)
    except AstunerError as error:
        main_process.send(WorkerReady({}, error))
        return None
    logger.remove()  # the main process logs the records
    logger.add(
        lambda message: main_process.send(as_log_record(message)), level="DEBUG", format="{message}", diagnose=False
    )
    main_process.send(WorkerReady(worker.ready()))
    return worker


def _serve_requests(worker: EpisodeWorker, engine: EngineClient, main_process: _MainProcess) -> None:
    episodes = ThreadPoolExecutor(1, thread_name_prefix="episodes")
    while True:
        match main_process.receive():
            case RunEpisode() as request:
                engine.policy_version, engine.max_model_len = request.policy_version, request.max_model_len
                episodes.submit(_run, partial(worker.run_episode, request.task, request.settings), main_process)
            case JudgeGroup() as group:
                episodes.submit(_run, partial(worker.judge_group, group.tasks, group.episodes), main_process)
            case GenerateAnswer() as answer:
                engine.set_result(answer)
            case ReportRequest():
                main_process.send(worker.report())


def _run(run: Callable[[], Episode | list[Episode]], main_process: _MainProcess) -> None:
    try:
        result = run()
    except DebuggerQuit:
        main_process.send(EpisodesEnded((), reached_tags()))
        return
    # Any exception must reach the main process, which would wait otherwise.
    except BaseException as error:
        main_process.send(EpisodesEnded((), reached_tags(), describe_error(error)))
        return
    _flush()
    episodes = result if isinstance(result, list) else [result]
    try:
        main_process.send(EpisodesEnded(episodes, reached_tags()))
    except Exception as error:  # objects of the user's code raise errors of any type when they are pickled
        text = f"the record of the episode cannot be sent to the main process: {describe_error(error)}"
        main_process.send(EpisodesEnded([_without_record(episode, text) for episode in episodes], reached_tags()))


def _without_record(episode: Episode, error: str) -> Episode:
    return replace(
        episode,
        status="failed",
        reward=None,
        is_success=None,
        agent_rewards={},
        calls=(),
        samples=(),
        metadata={},
        log_metrics={},
        judgement=None,
        error_kind="workflow",
        error=error,
    )


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the episode may have closed or replaced it
            stream.flush()
