"""Runs episodes in the caller's thread, one after another: in a worker process, or for a debugger."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from types import FrameType

from loguru import logger

from astuner.debugging.breakpoints import is_debugged
from astuner.debugging.tracebacks import format_stack, innermost_user_frame, thread_stack
from astuner.errors import EpisodeTimeout, shorten
from astuner.llm_engine.protocol import LlmEngine
from astuner.model_tuner.chat_options import CallSettings
from astuner.model_tuner.tuner import ModelTuner
from astuner.processes.episode_processes import EpisodeProcesses, end_current_episode
from astuner.schema import Episode, LlmCall, WorkflowTask
from astuner.system.clock import timestamp
from astuner.system.loop_thread import run_to_end
from astuner.system.signals import signal_handlers
from astuner.task_judge.judge_base import BaseGroupJudge
from astuner.task_rollout.active_episodes import ActiveEpisodes, RunningReport
from astuner.task_rollout.episode_loop import JobResult, run_job
from astuner.task_rollout.process_settings import ProcessSettings
from astuner.task_rollout.rollout import failed_episode, is_unjudged
from astuner.task_runner.groups import judge_group
from astuner.task_runner.runner import TaskRunner, describe_calls

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_RELEASE_SECONDS = 2.0


@dataclass
class EpisodesHere:
    """Runs episodes in the caller's thread (see `EpisodeExecutor`)."""

    runner: TaskRunner
    running: ActiveEpisodes = field(default_factory=ActiveEpisodes)
    _settings: ProcessSettings = field(default_factory=ProcessSettings, init=False)
    _current: _Running | None = field(default=None, init=False)

    @property
    def engine(self) -> LlmEngine | None:
        """Answers the LLM calls of the episodes."""
        return self.runner.engine

    @engine.setter
    def engine(self, engine: LlmEngine | None) -> None:
        self.runner = replace(self.runner, engine=engine)

    def run(self, tasks: Sequence[WorkflowTask], settings: CallSettings) -> Iterator[tuple[int, Episode]]:
        """Yield `(index, episode)`, in order. A signal ends the run."""
        for index, task in enumerate(tasks):
            with _signals_end_run() as received:
                episode = self.run_episode(task, settings, received)
            yield index, episode

    def judge(self, tasks: Sequence[WorkflowTask], episodes: Sequence[Episode]) -> Future[list[Episode]]:
        """Judge a group of episodes, before this returns."""
        done: Future[list[Episode]] = Future()
        done.set_result(self.judge_group(tasks, episodes))
        return done

    def reports(self) -> Sequence[RunningReport]:
        """Return the report of this process. Thread-safe."""
        return [self.running.local_report()]

    def sampled_tokens(self) -> int:
        """Return the number of tokens that the running episode has sampled."""
        return self.running.sampled_tokens()

    def run_episode(self, task: WorkflowTask, settings: CallSettings, received: Sequence[int] = ()) -> Episode:
        """Run one episode in this thread, without retries. The signals `received` during it end the run."""
        runner = self.runner

        async def run() -> Episode:
            current = _Running(task, runner.tuner(task, settings), EpisodeProcesses(task.episode_id))
            self._current = current
            with (
                self.running.track(task.episode_id, current.tuner, lambda: describe_calls(current.tuner)),
                current.processes.owned(),
            ):
                episode = await runner.run(task, current.tuner)
            return replace(episode, ended_processes=current.processes.ended)

        self._settings.read()
        try:
            result = run_job(run, received)
        finally:
            current, self._current = self._current, None
        # A debugger changes settings itself, and it would lose a worker that is replaced.
        changes = () if is_debugged() else self._settings.changes()
        if changes:
            logger.warning(
                "episode {} changed settings of its process: {}", shorten(task.episode_id), "; ".join(changes)
            )
        return replace(_finished_episode(task, current.tuner.calls if current else (), result), process_effects=changes)

    def judge_group(self, tasks: Sequence[WorkflowTask], episodes: Sequence[Episode]) -> list[Episode]:
        """Judge the episodes of one task in this thread, and return them with their rewards."""
        runner = self.runner
        assert isinstance(runner.judge, BaseGroupJudge)
        judging = judge_group(
            runner.judge,
            tasks[0],
            episodes,
            [task.seed for task in tasks],
            timeout=None if is_debugged() else runner.judge_timeout,
            max_samples=runner.max_samples,
            merge=runner.merge,
            inline=runner.judge_inline,
        )
        return run_to_end(judging)

    def abandon_episode(self) -> Episode | None:
        """Release what the running episode uses, because it blocks its thread; return it as failed.

        Another thread calls this. None if no episode runs.
        """
        current, runner = self._current, self.runner
        if current is None:
            return None
        stack = thread_stack(current.thread)
        released = runner.environments.release(current.task.episode_id)
        current.processes.end()
        runner.gateway.end_episode(current.tuner)
        if released is not None:  # this process ends soon
            wait([released], timeout=_RELEASE_SECONDS)
        logger.debug(
            "{}, {}, blocked its thread at\n{}",
            shorten(current.task.episode_id),
            describe_calls(current.tuner),
            format_stack(stack),
        )
        error = f"the episode blocked its thread for {timestamp() - current.started:.0f} s and was abandoned"
        if stack:
            frame = innermost_user_frame(stack) or stack[-1]
            error += f"; it was at {frame.filename}:{frame.lineno}, in {frame.name}: {frame.line}"
        failed = failed_episode(current.task, current.tuner.calls, "timeout", error, current.started)
        return replace(failed, ended_processes=current.processes.ended)

    def close(self) -> None:
        """End the processes of an episode that an interrupt has left running, and what the runner uses."""
        end_current_episode()
        self.runner.gateway.close()
        self.runner.environments.close()
        if self.runner.judge is not None:
            self.runner.judge.close()


@dataclass(frozen=True)
class _Running:
    """An episode that runs in this process, and the thread that runs it."""

    task: WorkflowTask
    tuner: ModelTuner
    processes: EpisodeProcesses
    started: float = field(default_factory=timestamp)
    thread: threading.Thread = field(default_factory=threading.current_thread)


@contextlib.contextmanager
def _signals_end_run() -> Iterator[Sequence[int]]:
    """Make a signal end the run, even if it arrives inside a workflow, whose exceptions only fail the episode.

    Yields the list of the signals received so far.
    """
    received: list[int] = []

    def interrupt(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    with signal_handlers(_SIGNALS, interrupt):
        try:
            yield received
        except KeyboardInterrupt:
            if not received:
                raise
    if received:
        signal.raise_signal(received[0])


def _finished_episode(task: WorkflowTask, calls: tuple[LlmCall, ...], result: JobResult[Episode]) -> Episode:
    """Return the episode of a job, which made `calls`. An exception that nothing caught makes it `failed`."""
    episode = result.value or failed_episode(task, calls, "internal", "it has no result")
    if not result.uncaught and result.value is not None:
        return episode
    tracebacks = [episode.error_traceback, *(error.traceback for error in result.uncaught)]
    error_traceback = "\n\n".join(filter(None, tracebacks))
    if result.value is not None and episode.status == "failed" and not is_unjudged(episode):
        # A workflow may wait forever because a thread or callback has failed.
        causes = [error.text for error in result.uncaught] if episode.error_kind == EpisodeTimeout.kind else []
        return replace(episode, error="; ".join([episode.error or "", *causes]), error_traceback=error_traceback)
    return replace(
        episode,
        status="failed",
        reward=None,
        agent_rewards={},
        judgement=None,
        is_success=None,
        calls=tuple(replace(call, reward=None) for call in episode.calls),
        samples=(),
        dropped_samples=0,
        error_kind="internal" if all(error.is_internal for error in result.uncaught) else "workflow",
        error="; ".join(error.text for error in result.uncaught) or episode.error,
        error_traceback=error_traceback,
    )
