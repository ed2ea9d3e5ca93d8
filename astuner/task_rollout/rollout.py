"""Runs batches of episodes: tasks × repeats."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass, field, replace
from typing import Protocol

from loguru import logger

from astuner.errors import (
    CallLimitError,
    JudgeBudgetError,
    JudgeUnavailableError,
    UnjudgedError,
    shorten,
    without_variable_parts,
)
from astuner.llm_engine.protocol import LlmEngine
from astuner.model_tuner.chat_options import CallSettings
from astuner.schema import Episode, LlmCall, Split, Task, WorkflowTask
from astuner.system.clock import timestamp
from astuner.task_rollout.active_episodes import ActiveEpisodes, RunningReport

OnEpisode = Callable[[Episode], None]

# Of `describe_failures`: errors, and tasks of an error, that are shown, and the length of a task's id.
_MAX_GROUPS, _MAX_TASKS, _MAX_ID = 3, 3, 40


@dataclass(frozen=True)
class BatchRequest:
    """A batch of episodes to run.

    Attributes:
        tasks: the tasks, without duplicates.
        step: the training step; part of ids and seeds.
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


class EpisodeExecutor(Protocol):
    """Runs episodes, in worker processes or in this process, with `engine`, which is set before `run`."""

    engine: LlmEngine | None

    def run(self, tasks: Sequence[WorkflowTask], settings: CallSettings) -> Iterator[tuple[int, Episode]]:
        """Yield `(index, episode)` in order of completion."""
        ...

    def judge(self, tasks: Sequence[WorkflowTask], episodes: Sequence[Episode]) -> Future[list[Episode]]:
        """Judge the episodes of one task, each with its task; the result has the same order."""
        ...

    def reports(self) -> Sequence[RunningReport]:
        """Return the report of each process that runs an episode. Thread-safe."""
        ...

    def sampled_tokens(self) -> int:
        """Return the number of tokens that the running episodes have sampled, in ended calls. Thread-safe."""
        ...

    def close(self) -> None:
        """End the processes."""
        ...


@dataclass
class _GroupJudging:
    """Collects the episodes of the batch's `tasks` that wait for their group, and has complete groups judged."""

    executor: EpisodeExecutor
    tasks: Sequence[WorkflowTask]
    _left: Counter[str] = field(init=False)
    _waiting: dict[str, list[tuple[int, WorkflowTask, Episode]]] = field(default_factory=dict, init=False)
    _running: dict[Future[list[Episode]], Sequence[int]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._left = Counter(task.task_id for task in self.tasks)

    def add(self, index: int, task: WorkflowTask, episode: Episode) -> None:
        """Take the last attempt of episode `index`, which ran `task`; judge its group once it is complete."""
        waiting = self._waiting.setdefault(task.task_id, [])
        if is_unjudged(episode):
            waiting.append((index, task, episode))
        self._left[task.task_id] -= 1
        if self._left[task.task_id] or not waiting:
            return
        group = sorted(self._waiting.pop(task.task_id), key=lambda entry: entry[0])
        indexes, tasks, episodes = zip(*group, strict=True)
        self._running[self.executor.judge(tasks, episodes)] = indexes

    def judged(self, *, wait: bool = False) -> Iterator[tuple[int, Episode]]:
        """Yield index and result of the episodes judged since the last call; `wait` for those being judged."""
        done = [future for future in (as_completed(self._running) if wait else self._running) if future.done()]
        for future in done:
            yield from zip(self._running.pop(future), future.result(), strict=True)


@dataclass
class TaskRollout:
    """Runs batches of episodes, and each failed episode again, at most `max_retries` times."""

    executor: EpisodeExecutor
    max_retries: int = 0
    running: ActiveEpisodes = field(default_factory=ActiveEpisodes)

    def run(
        self,
        request: BatchRequest,
        on_episode: OnEpisode = lambda _: None,
        on_attempt: OnEpisode = lambda _: None,
    ) -> list[Episode]:
        """Run a batch and return its episodes, by task and then by repeat.

        Failed episodes are included. A retried episode is preceded by its failed attempts.

        Args:
            on_episode: called in this thread with each finished episode, in order of completion.
            on_attempt: called in this thread with each attempt, including those that are retried; before `on_episode`.
        """
        tasks = [_episode_task(request, task, repeat) for task, repeat in request.episodes()]
        attempts: list[list[Episode]] = [[] for _ in tasks]

        def end(index: int, episode: Episode) -> None:
            attempts[index].append(episode)
            on_attempt(episode)
            on_episode(episode)

        groups = _GroupJudging(self.executor, tasks)
        to_run = list(range(len(tasks)))
        for attempt in range(self.max_retries + 1):
            attempted = [tasks[i] for i in to_run]
            if attempt:
                attempted = [
                    replace(task, episode_id=f"{task.episode_id}#{attempt + 1}", seed=task.seed + attempt)
                    for task in attempted
                ]
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

    def close(self) -> None:
        """End the processes that run the episodes."""
        self.executor.close()

    def _run_once(self, tasks: Sequence[WorkflowTask], settings: CallSettings) -> Iterator[tuple[int, Episode]]:
        with self.running.include_remote(self.executor.reports, self.executor.sampled_tokens):
            yield from self.executor.run(tasks, settings)


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


def is_unjudged(episode: Episode) -> bool:
    """Return whether an episode waits for the other episodes of its task, to be judged with them."""
    return episode.status == "failed" and episode.error_kind == UnjudgedError.kind


def _is_retried(episode: Episode) -> bool:
    stops_run = (JudgeUnavailableError.kind, JudgeBudgetError.kind)
    return episode.status == "failed" and not is_unjudged(episode) and episode.error_kind not in stops_run


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


def describe_failures(episodes: Sequence[Episode]) -> list[str]:
    """Return a text for each error of the failed and dropped episodes, the most frequent first.

    Errors that differ only in numbers, ids and paths count as one, which is shown as it occurred first:
    `[workflow] ValueError: no tool 4 (12 times, tasks a, b, c and 5 more)`. After three errors, the others are counted.
    """
    groups: dict[str, list[Episode]] = {}
    for episode in episodes:
        if episode.status != "ok":
            groups.setdefault(without_variable_parts(f"[{episode.error_kind}] {episode.error}"), []).append(episode)
    ranked = sorted(groups.values(), key=len, reverse=True)
    texts = [_text(group) for group in ranked[:_MAX_GROUPS]]
    if others := ranked[_MAX_GROUPS:]:
        number = sum(map(len, others))
        texts.append(f"{len(others)} other errors ({number} episodes)" if len(others) > 1 else _text(others[0]))
    return texts


def _text(group: Sequence[Episode]) -> str:
    ids = [shorten(task_id, _MAX_ID) for task_id in dict.fromkeys(episode.task.task_id for episode in group)]
    more = f" and {len(ids) - _MAX_TASKS} more" if len(ids) > _MAX_TASKS else ""
    tasks = f"task{'' if len(ids) == 1 else 's'} {', '.join(ids[:_MAX_TASKS])}{more}"
    times = "" if len(group) == 1 else f"{len(group)} times, "
    return f"[{group[0].error_kind}] {group[0].error} ({times}{tasks})"
