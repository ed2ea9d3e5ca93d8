"""A batch of episodes: tasks × repeats, isolated from one another."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace

from loguru import logger

from astuner.model_tuner import CallSettings, ModelTuner
from astuner.schema import Episode, LlmCall, Split, Task, WorkflowTask
from astuner.stacks import shown
from astuner.task_rollout.main_thread import MainThread
from astuner.task_rollout.pool import EpisodePool, Stuck
from astuner.task_rollout.running import RunningEpisodes
from astuner.task_runner import TaskRunner, last_call, own_frame

OnEpisode = Callable[[Episode], None]


@dataclass(frozen=True)
class BatchRequest:
    """Which episodes to run.

    Attributes:
        tasks: the problems, each once.
        repeats: episodes per task.
        split: train or val.
        step: the training step, for ids and seeds.
        seed: the run's seed.
        settings: sampling and lengths.
        only: the episodes to run, by task id and repeat; None for all.
    """

    tasks: Sequence[Task]
    repeats: int
    split: Split
    step: int
    seed: int
    settings: CallSettings
    only: frozenset[tuple[str, int]] | None = None

    def episodes(self) -> list[tuple[Task, int]]:
        """Return task and repeat of each episode, in order."""
        pairs = [(task, repeat) for task in self.tasks for repeat in range(self.repeats)]
        return pairs if self.only is None else [pair for pair in pairs if (pair[0].task_id, pair[1]) in self.only]


@dataclass
class TaskRollout:
    """Runs batches of episodes on worker threads, or one after another in the main thread.

    Attributes:
        runner: runs one episode.
        workers: episodes at the same time.
        max_retries: how often a failed episode is run again.
        in_main_thread: run them one after another in the caller's thread, for debuggers.
        running: knows the episodes that run.
    """

    runner: TaskRunner
    workers: int = 128
    max_retries: int = 0
    in_main_thread: bool = False
    running: RunningEpisodes = field(default_factory=RunningEpisodes)
    _pool: EpisodePool[Episode] | MainThread[Episode] = field(init=False)

    def __post_init__(self) -> None:
        # The runner bounds workflow and judge itself; the pool only catches what blocks its thread.
        deadline = self.runner.episode_timeout + self.runner.judge_timeout
        self._pool = MainThread() if self.in_main_thread else EpisodePool(self.workers, deadline)

    def run(
        self,
        request: BatchRequest,
        on_episode: OnEpisode = lambda _: None,
        on_attempt: OnEpisode = lambda _: None,
    ) -> list[Episode]:
        """Return the episodes, by task and then repeat; failed ones are among them, with their reason.

        An episode that was run again is preceded by its failed attempts.

        Args:
            request: which episodes to run.
            on_episode: called in this thread with each finished episode, in order of completion.
            on_attempt: called here before it, and with each failed attempt that is run again.
        """
        planned = [_episode_task(request, task, repeat) for task, repeat in request.episodes()]
        attempts: list[list[Episode]] = [[] for _ in planned]
        to_run = list(range(len(planned)))
        for attempt in range(self.max_retries + 1):
            last = attempt == self.max_retries
            for place, episode in self._attempt([_again(planned[i], attempt) for i in to_run], request.settings):
                attempts[to_run[place]].append(episode)
                on_attempt(episode)
                if last or episode.status != "failed":
                    on_episode(episode)
            to_run = [i for i in to_run if attempts[i][-1].status == "failed"]
            if not to_run:
                break
            if not last:
                why = attempts[to_run[0]][-1].error
                logger.warning(
                    "running {} failed episodes again (attempt {}); the first: {}", len(to_run), attempt + 2, why
                )
        report_failures([tried[-1] for tried in attempts], request)
        return [episode for tried in attempts for episode in tried]

    def close(self) -> None:
        """End the worker threads."""
        self._pool.close()

    def _attempt(self, tasks: Sequence[WorkflowTask], settings: CallSettings) -> Iterator[tuple[int, Episode]]:
        tuners = [self.runner.tuner(task, settings) for task in tasks]

        def maker(task: WorkflowTask, tuner: ModelTuner) -> Callable[[], Coroutine[object, object, Episode]]:
            return lambda: self._run(task, tuner)

        for index, result in self._pool.run(list(map(maker, tasks, tuners))):
            if isinstance(result, Stuck):
                task, tuner = tasks[index], tuners[index]
                logger.debug(
                    "{}, {}, blocked its thread at\n{}", task.episode_id, last_call(tuner), shown(result.stack)
                )
                yield index, _stuck_episode(task, tuner.calls, result)
            else:
                yield index, result

    async def _run(self, task: WorkflowTask, tuner: ModelTuner) -> Episode:
        with self.running.entered(task.episode_id, tuner):
            return await self.runner.run(task, tuner)


def episode_seed(seed: int, split: str, step: int, task_id: str, repeat: int) -> int:
    """Return a 63-bit seed that depends on all of these and on nothing else."""
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


def lost_episodes(request: BatchRequest, kind: str, error: str) -> list[Episode]:
    """Return failed episodes for all of `request`, of which nothing is known but why they were lost."""
    now = time.time()
    return [
        Episode(
            episode_id=_episode_task(request, task, repeat).episode_id,
            task=task,
            repeat_index=repeat,
            status="failed",
            reward=None,
            is_success=None,
            error_kind=kind,
            error=error,
            start_time=now,
            end_time=now,
        )
        for task, repeat in request.episodes()
    ]


def _again(task: WorkflowTask, attempt: int) -> WorkflowTask:
    """Return the task for its 0-based `attempt`: beyond the first, an episode with id and draws of its own."""
    if attempt == 0:
        return task
    return replace(task, episode_id=f"{task.episode_id}#{attempt + 1}", seed=task.seed + attempt)


def _stuck_episode(task: WorkflowTask, calls: tuple[LlmCall, ...], stuck: Stuck) -> Episode:
    now = time.time()
    return Episode(
        episode_id=task.episode_id,
        task=task.task,
        repeat_index=task.repeat_index,
        status="failed",
        reward=None,
        is_success=None,
        calls=calls,
        error_kind="timeout",
        error=f"the episode blocked its thread for {stuck.seconds:.0f} s and was given up{_place(stuck)}",
        start_time=now - stuck.seconds,
        end_time=now,
    )


def _place(stuck: Stuck) -> str:
    if not stuck.stack:
        return ""
    place = own_frame(stuck.stack) or stuck.stack[-1]
    return f"; it stood at {place.filename}:{place.lineno}, in {place.name}: {place.line}"


def report_failures(episodes: Sequence[Episode], request: BatchRequest) -> None:
    """Warn of episodes that are left out, with their reasons."""
    lost = [episode for episode in episodes if episode.status != "ok"]
    if not lost:
        return
    kinds = Counter(episode.error_kind for episode in lost)
    logger.warning(
        "{} step {}: {} of {} episodes are left out ({}); the first: {}",
        request.split,
        request.step,
        len(lost),
        len(episodes),
        ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()),
        lost[0].error,
    )
