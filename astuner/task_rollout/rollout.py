"""Runs batches of episodes: tasks × repeats, isolated from each other."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Protocol

from loguru import logger

from astuner.debugging.tracebacks import format_stack
from astuner.errors import CallLimitError, EpisodeTimeout, JudgeBudgetError, JudgeUnavailableError, shorten
from astuner.llm_engine.protocol import LlmEngine
from astuner.model_tuner import CallSettings, ModelTuner
from astuner.processes.episode_processes import EpisodeProcesses, end_all_episodes
from astuner.processes.process_hooks import install_hooks
from astuner.schema import Episode, LlmCall, Split, Task, WorkflowTask
from astuner.system.clock import timestamp
from astuner.task_rollout.active_episodes import ActiveEpisodes, RunningReport
from astuner.task_rollout.episode_loop import Job, JobResult
from astuner.task_rollout.failure_groups import describe_failures
from astuner.task_rollout.group_judging import GroupJudging, JudgeHere, judge_here
from astuner.task_rollout.pool import EpisodePool, InlinePool, StuckJob
from astuner.task_runner import TaskRunner, describe_calls, innermost_user_frame, is_unjudged

OnEpisode = Callable[[Episode], None]


@dataclass(frozen=True)
class BatchRequest:
    """A batch of episodes to run.

    Attributes:
        tasks: the tasks, without duplicates.
        repeats: episodes per task.
        split: `train` or `val`.
        step: the training step; part of ids and seeds.
        seed: the seed of the run.
        settings: sampling parameters and lengths.
        only: the (task id, repeat) pairs to run; None for all.
    """

    tasks: Sequence[Task]
    repeats: int
    split: Split
    step: int
    seed: int
    settings: CallSettings
    only: frozenset[tuple[str, int]] | None = None

    def episodes(self) -> list[tuple[Task, int]]:
        """Return the task and the repeat index of each episode, in order."""
        pairs = [(task, repeat) for task in self.tasks for repeat in range(self.repeats)]
        return pairs if self.only is None else [pair for pair in pairs if (pair[0].task_id, pair[1]) in self.only]


class WorkerProcesses(Protocol):
    """Processes that run episodes in place of this one.

    Attributes:
        engine: answers the LLM calls of the episodes; set before `run`.
    """

    engine: LlmEngine | None

    def run(self, tasks: Sequence[WorkflowTask], settings: CallSettings) -> Iterator[tuple[int, Episode]]:
        """Yield `(index, episode)` in order of completion."""
        ...

    def judge(self, tasks: Sequence[WorkflowTask], episodes: Sequence[Episode]) -> Future[list[Episode]]:
        """Judge a group of episodes in one of the processes (see `GroupJudge`)."""
        ...

    def reports(self) -> Sequence[RunningReport]:
        """Return the report of each process that runs an episode. Thread-safe."""
        ...

    def close(self) -> None:
        """End the processes."""
        ...


@dataclass
class TaskRollout:
    """Runs batches of episodes in worker processes, on worker threads, or one after another in the main thread.

    Attributes:
        runner: runs one episode in this process; None if other processes run them.
        workers: the maximum number of concurrent episodes.
        max_retries: how often a failed episode is retried.
        in_main_thread: run episodes one after another in the caller's thread, for debuggers.
        running: the running episodes.
        processes: the processes that run the episodes; None to run them in this process.
    """

    runner: TaskRunner | None
    workers: int = 128
    max_retries: int = 0
    in_main_thread: bool = False
    running: ActiveEpisodes = field(default_factory=ActiveEpisodes)
    processes: WorkerProcesses | None = None
    _pool: EpisodePool[Episode] | InlinePool[Episode] = field(init=False)
    _judge: JudgeHere = field(init=False)

    def __post_init__(self) -> None:
        if self.runner is None:
            return
        self._judge = JudgeHere(self.runner)
        # The runner applies the timeouts of workflow and judge; the pool handles only episodes that block their thread.
        install_hooks()
        deadline = self.runner.episode_timeout + self.runner.judge_timeout
        self._pool = InlinePool() if self.in_main_thread else EpisodePool(self.workers, deadline)

    def run(
        self,
        request: BatchRequest,
        on_episode: OnEpisode = lambda _: None,
        on_attempt: OnEpisode = lambda _: None,
    ) -> list[Episode]:
        """Run a batch and return its episodes, by task and then by repeat.

        Failed episodes are included. A retried episode is preceded by its failed attempts.

        Args:
            request: the episodes to run.
            on_episode: called in this thread with each finished episode, in order of completion.
            on_attempt: called in this thread with each attempt, including those that are retried; before `on_episode`.
        """
        tasks = [_episode_task(request, task, repeat) for task, repeat in request.episodes()]
        attempts: list[list[Episode]] = [[] for _ in tasks]

        def end(index: int, episode: Episode) -> None:
            attempts[index].append(episode)
            on_attempt(episode)
            on_episode(episode)

        groups = GroupJudging(self.processes or self._judge, tasks)
        to_run = list(range(len(tasks)))
        for attempt in range(self.max_retries + 1):
            attempted = [_retry(tasks[i], attempt) for i in to_run]
            failed: list[Episode] = []
            retried = []
            for index, episode in self._run_once(attempted, request.settings):
                task_index = to_run[index]
                if attempt < self.max_retries and _is_retried(episode):
                    attempts[task_index].append(episode)
                    on_attempt(episode)
                    retried.append(task_index)
                    failed.append(episode)
                    continue
                if not is_unjudged(episode):
                    end(task_index, episode)
                groups.add(task_index, attempted[index], episode)
                for judged_index, judged in groups.judged():
                    end(judged_index, judged)
            to_run = sorted(retried)
            if not to_run:
                break
            logger.warning(
                "retrying {} failed episodes (attempt {}); the first: {}", len(to_run), attempt + 2, failed[0].error
            )
        for judged_index, judged in groups.judged(wait=True):
            end(judged_index, judged)
        report_failures([episode_attempts[-1] for episode_attempts in attempts], request)
        return [episode for episode_attempts in attempts for episode in episode_attempts]

    def run_episode(self, task: WorkflowTask, settings: CallSettings) -> Episode:
        """Run one episode in this process, without retries, and return it."""
        ((_, episode),) = self._run_here([task], settings)
        return episode

    def judge_group(self, tasks: Sequence[WorkflowTask], episodes: Sequence[Episode]) -> list[Episode]:
        """Judge the episodes of one task in this thread, and return them with their rewards."""
        assert self.runner is not None
        return judge_here(self.runner, tasks, episodes)

    def close(self) -> None:
        """End the worker threads or processes, and the processes of episodes that an interrupt has left running."""
        if self.processes is not None:
            self.processes.close()
        end_all_episodes()
        if self.runner is None:
            return
        self._judge.close()
        self.runner.gateway.close()
        self.runner.environments.close()
        if self.runner.judge is not None:
            self.runner.judge.close()
        self._pool.close()

    def _run_once(self, tasks: Sequence[WorkflowTask], settings: CallSettings) -> Iterator[tuple[int, Episode]]:
        if self.processes is None:
            yield from self._run_here(tasks, settings)
            return
        with self.running.include_remote(self.processes.reports):
            yield from self.processes.run(tasks, settings)

    def _run_here(self, tasks: Sequence[WorkflowTask], settings: CallSettings) -> Iterator[tuple[int, Episode]]:
        runner = self.runner
        assert runner is not None
        # An entry is made when the episode starts and removed when it has ended: a tuner holds all messages.
        running: dict[int, tuple[ModelTuner, EpisodeProcesses]] = {}

        def job(index: int, task: WorkflowTask) -> Job[Episode]:
            async def run() -> Episode:
                tuner, children = runner.tuner(task, settings), EpisodeProcesses(task.episode_id)
                running[index] = tuner, children
                with self.running.track(task.episode_id, tuner):
                    with children.owned():
                        episode = await runner.run(task, tuner)
                    return replace(episode, ended_processes=children.ended)

            return run

        for index, result in self._pool.run([job(index, task) for index, task in enumerate(tasks)]):
            task = tasks[index]
            if index not in running:  # it has not made its model
                if isinstance(result, StuckJob):
                    yield index, _stuck_episode(task, (), result)
                else:
                    yield index, _finished_episode(task, (), result)
                continue
            tuner, children = running.pop(index)
            if isinstance(result, StuckJob):
                children.end()
                runner.gateway.end_episode(tuner)
                runner.environments.release(task.episode_id)
                stack = format_stack(result.stack)
                logger.debug(
                    "{}, {}, blocked its thread at\n{}", shorten(task.episode_id), describe_calls(tuner), stack
                )
                yield index, replace(_stuck_episode(task, tuner.calls, result), ended_processes=children.ended)
            else:
                yield index, _finished_episode(task, tuner.calls, result)


def episode_seed(seed: int, split: str, step: int, task_id: str, repeat: int) -> int:
    """Return a 63-bit seed that is a function of the arguments only."""
    text = f"{seed}|{split}|{step}|{task_id}|{repeat}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def _episode_task(request: BatchRequest, task: Task, repeat: int) -> WorkflowTask:
    return WorkflowTask(
        task=task,
        episode_id=f"{request.split}-{request.step:06d}-{task.task_id}-{repeat}",
        repeat_index=repeat,
        seed=episode_seed(request.seed, request.split, request.step, task.task_id, repeat),
        is_validation=request.split == "val",
    )


def failed_episodes(request: BatchRequest, kind: str, error: str) -> list[Episode]:
    """Return a failed episode without calls for each episode of `request`, for example after a worker died."""
    return [
        failed_episode(_episode_task(request, task, repeat), (), kind, error) for task, repeat in request.episodes()
    ]


def _is_retried(episode: Episode) -> bool:
    """Return whether another attempt may succeed."""
    stops_run = (JudgeUnavailableError.kind, JudgeBudgetError.kind)
    return episode.status == "failed" and not is_unjudged(episode) and episode.error_kind not in stops_run


def _retry(task: WorkflowTask, attempt: int) -> WorkflowTask:
    """Return the task for the 0-based `attempt`; retries have another episode id and seed."""
    if attempt == 0:
        return task
    return replace(task, episode_id=f"{task.episode_id}#{attempt + 1}", seed=task.seed + attempt)


def _stuck_episode(task: WorkflowTask, calls: tuple[LlmCall, ...], stuck: StuckJob) -> Episode:
    now = timestamp()
    error = f"the episode blocked its thread for {stuck.seconds:.0f} s and was abandoned"
    if stuck.stack:
        frame = innermost_user_frame(stuck.stack) or stuck.stack[-1]
        error += f"; it was at {frame.filename}:{frame.lineno}, in {frame.name}: {frame.line}"
    return failed_episode(task, calls, "timeout", error, now - stuck.seconds)


def failed_episode(
    task: WorkflowTask, calls: tuple[LlmCall, ...], kind: str, error: str, started: float | None = None
) -> Episode:
    """Return the failed episode of a task, with the LLM calls that it made; `started` in seconds since the epoch."""
    now = timestamp()
    return Episode(
        episode_id=task.episode_id,
        task=task.task,
        repeat_index=task.repeat_index,
        status="failed",
        reward=None,
        is_success=None,
        calls=calls,
        error_kind=kind,
        error=error,
        start_time=now if started is None else started,
        end_time=now,
    )


def _finished_episode(task: WorkflowTask, calls: tuple[LlmCall, ...], result: JobResult[Episode]) -> Episode:
    """Return the episode of a job, which made `calls`. An exception that nothing caught makes it `failed`."""
    episode = result.value or failed_episode(task, calls, "internal", "it has no result")
    if result.effects:
        logger.warning(
            "episode {} changed settings of the process, which all episodes share. These settings were restored: {}",
            shorten(task.episode_id),
            "; ".join(result.effects),
        )
        episode = replace(episode, process_effects=result.effects)
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


def report_failures(episodes: Sequence[Episode], request: BatchRequest) -> None:
    """Log how many episodes were cut, and a warning if episodes failed or were dropped, with the reasons."""
    cut = sum(episode.status == "ok" and episode.error_kind == CallLimitError.kind for episode in episodes)
    if cut:
        logger.info(
            "{} step {}: {} of {} episodes were cut at rollout.multi_turn.max_steps and scored as they were then",
            request.split,
            request.step,
            cut,
            len(episodes),
        )
    unusable = [episode for episode in episodes if episode.status != "ok"]
    if not unusable:
        return
    logger.warning(
        "{} step {}: {} of {} episodes are left out: {}",
        request.split,
        request.step,
        len(unusable),
        len(episodes),
        "; ".join(describe_failures(unusable)),
    )
