"""A process that runs episodes, one at a time.

The workflow and the judge run here. LLM calls go through a socket to the main process, which has the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import itertools
import os
import pickle
import queue
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from loguru import logger

from astuner.backbone.episode_workers.messages import (
    DISCONNECTED,
    AbandonEpisode,
    AgentJob,
    EpisodesEnded,
    FromWorker,
    GenerateAnswer,
    GenerateCancelled,
    GenerateRequest,
    JudgeGroup,
    ReportRequest,
    RunEpisode,
    ToWorker,
    WorkerReady,
    as_log_record,
)
from astuner.backbone.training.agent import load_agent
from astuner.debugging.breakpoints import DebuggerQuit, reached_tags
from astuner.errors import AstunerError, describe_error
from astuner.helper_llm.usage import share_limits
from astuner.model_tuner.codec import ChatCodec
from astuner.processes.episode_processes import end_current_episode
from astuner.run_record.jsonable import to_jsonable
from astuner.schema import Completion, Episode, SamplingParams
from astuner.system.forking import name_process
from astuner.system.redaction.redactor import redact, secret_variables
from astuner.task_rollout.episodes_here import EpisodesHere

# If memory runs out, the kernel kills this process before the main process, which has the model.
_OOM_SCORE = 500


class _MainProcess:
    """The connection to the main process. Any thread may send."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._inode = os.fstat(connection.fileno()).st_ino
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def send(self, message: FromWorker) -> None:
        """Send a message; raise whatever pickling it raises."""
        if os.getpid() != self._pid:  # a fork of the process has inherited the connection
            return
        frame = pickle.dumps(message)
        with self._lock:
            try:
                self._check()
                self._connection.send_bytes(frame)
            except (BrokenPipeError, ConnectionResetError):
                # The main process has ended. `receive` sees it, too, and what the episode uses must be released first.
                return
            except OSError:
                os._exit(DISCONNECTED)

    def receive(self) -> ToWorker:
        """Wait for the next message. EOFError: the main process has ended; OSError: the episode has disconnected."""
        self._check()
        try:
            message: ToWorker = self._connection.recv()
        except ConnectionResetError as error:  # the main process has not read all messages of this one
            raise EOFError from error
        return message

    def _check(self) -> None:
        """Check that the descriptor is still the connection, and not a file that the episode has opened."""
        if os.fstat(self._connection.fileno()).st_ino != self._inode:
            raise OSError("the connection to the main process was closed")


class EngineClient:
    """The `LlmEngine` of a worker process: the main process's engine."""

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
        future, result = self._pending.pop(answer.number, None), answer.result
        if future is None:
            return

        def settle() -> None:
            if future.done():
                return
            if isinstance(result, AstunerError):
                future.set_exception(result)
            else:
                future.set_result(result)

        with contextlib.suppress(RuntimeError):  # its event loop is closed
            future.get_loop().call_soon_threadsafe(settle)

    def close(self) -> None:
        """Do nothing: the main process owns the engine."""


def serve(job: AgentJob, codec: ChatCodec, connection: int, crash_file: int) -> NoReturn:
    """Run episodes until the main process closes the connection, then end this process.

    Args:
        crash_file: descriptor of a file for the stacks of all threads. They are written if a signal such as SIGSEGV
            ends the process, and on SIGUSR1, even while C code blocks the interpreter.
    """
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

    def reject_breakpoint(*_args: object, **_options: object) -> NoReturn:
        raise RuntimeError(
            "breakpoint() needs the terminal, which an episode's worker process does not have; write astuner.bp('TAG') "
            "and run with --db=TAG, or run with --backbone=debug astuner.debug.debug_max_parallel=1"
        )

    sys.breakpointhook = reject_breakpoint
    main_process = _MainProcess(Connection(connection))
    engine = EngineClient(main_process)
    try:
        episodes = _load(job, engine, codec, main_process)
        if episodes is not None:
            jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
            serving = (episodes, engine, main_process, jobs)
            threading.Thread(target=_serve_requests, args=serving, name="main process", daemon=True).start()
            while True:  # episodes run in the main thread, as in a script of the user's
                jobs.get()()
    finally:
        os._exit(0)  # threads of episodes may never end


def _load(job: AgentJob, engine: EngineClient, codec: ChatCodec, main_process: _MainProcess) -> EpisodesHere | None:
    """Load the agent and the judge, and tell the main process; return what runs their episodes, or None."""
    try:
        job.prepare_process()
        share_limits(job.limits)
        episodes = load_agent(job, codec)
    except AstunerError as error:
        main_process.send(WorkerReady({}, error))
        return None
    episodes.runner = replace(episodes.runner, engine=engine, on_call=main_process.send)
    logger.remove()  # the main process logs the records
    logger.add(
        lambda message: main_process.send(as_log_record(message)), level="DEBUG", format="{message}", diagnose=False
    )
    main_process.send(WorkerReady(secret_variables()))
    return episodes


def _serve_requests(
    episodes: EpisodesHere,
    engine: EngineClient,
    main_process: _MainProcess,
    jobs: queue.SimpleQueue[Callable[[], object]],
) -> None:
    """Serve requests, of which `jobs` are for the main thread, until the main process closes the connection."""
    try:
        while True:
            match main_process.receive():
                case RunEpisode() as request:
                    engine.policy_version, engine.max_model_len = request.policy_version, request.max_model_len
                    run = partial(episodes.run_episode, request.task, request.settings)
                    jobs.put(partial(_run, run, main_process))
                case JudgeGroup() as group:
                    judge = partial(episodes.judge_group, group.tasks, group.episodes)
                    jobs.put(partial(_run, judge, main_process))
                case AbandonEpisode():
                    if (episode := episodes.abandon_episode()) is not None:
                        main_process.send(EpisodesEnded([_portable(episode)], reached_tags()))
                case GenerateAnswer() as answer:
                    engine.set_result(answer)
                case ReportRequest():
                    main_process.send(episodes.running.local_report())
    except EOFError:
        end_current_episode()
        episodes.runner.environments.close()
        _flush()
        os._exit(0)
    except OSError:
        os._exit(DISCONNECTED)


def _run(run: Callable[[], Episode | list[Episode]], main_process: _MainProcess) -> None:
    try:
        result = run()
        episodes = [_portable(episode) for episode in (result if isinstance(result, list) else [result])]
    except DebuggerQuit:
        main_process.send(EpisodesEnded((), reached_tags()))
        return
    # Any exception must reach the main process, which would wait otherwise.
    except BaseException as error:
        main_process.send(EpisodesEnded((), reached_tags(), describe_error(error)))
        return
    _flush()
    try:
        main_process.send(EpisodesEnded(episodes, reached_tags()))
    except Exception as error:  # objects of the user's code raise errors of any type when they are pickled
        text = f"the record of the episode cannot be sent to the main process: {describe_error(error)}"
        main_process.send(EpisodesEnded([_without_record(episode, text) for episode in episodes], reached_tags()))


def _portable(episode: Episode) -> Episode:
    """Return the episode without objects that other processes may be unable to unpickle."""
    return replace(episode, metadata=to_jsonable(episode.metadata, redact))  # type: ignore[arg-type]


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
