"""Judges a task's episodes together, when all of them have ended."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Protocol

from astuner.debugging.breakpoints import is_debugged
from astuner.schema import Episode, WorkflowTask
from astuner.task_judge.judge_base import BaseGroupJudge
from astuner.task_runner import TaskRunner, is_unjudged, judge_group

_GROUPS_AT_ONCE = 32


class GroupJudge(Protocol):
    """Judges the episodes of one task."""

    def judge(self, tasks: Sequence[WorkflowTask], episodes: Sequence[Episode]) -> Future[list[Episode]]:
        """Judge the episodes, each with its task; the result has them in the same order."""
        ...


@dataclass
class GroupJudging:
    """Collects the episodes of a batch that wait for their group, and has complete groups judged.

    Attributes:
        judge: judges the groups.
        tasks: the task of each episode of the batch.
    """

    judge: GroupJudge
    tasks: Sequence[WorkflowTask]
    _left: Counter[str] = field(init=False)
    _waiting: dict[str, list[tuple[int, WorkflowTask, Episode]]] = field(default_factory=dict, init=False)
    _running: dict[Future[list[Episode]], Sequence[int]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._left = Counter(task.task_id for task in self.tasks)

    def add(self, index: int, task: WorkflowTask, episode: Episode) -> None:
        """Take the last attempt of an episode; judge its group if it is the last of it.

        Args:
            index: the index of the episode in `tasks`.
            task: its task, as the attempt was given it.
            episode: the episode.
        """
        waiting = self._waiting.setdefault(task.task_id, [])
        if is_unjudged(episode):
            waiting.append((index, task, episode))
        self._left[task.task_id] -= 1
        if self._left[task.task_id] or not waiting:
            return
        group = sorted(self._waiting.pop(task.task_id), key=lambda entry: entry[0])
        indexes, tasks, episodes = zip(*group, strict=True)
        self._running[self.judge.judge(tasks, episodes)] = indexes

    def judged(self, *, wait: bool = False) -> Iterator[tuple[int, Episode]]:
        """Yield the index and the result of each episode that has been judged since the last call.

        Args:
            wait: wait for the groups that are being judged.
        """
        done = [future for future in (as_completed(self._running) if wait else self._running) if future.done()]
        for future in done:
            yield from zip(self._running.pop(future), future.result(), strict=True)


@dataclass
class JudgeHere:
    """Judges groups in this process: in threads, or in the caller's thread.

    Attributes:
        runner: its judge, and how the judge runs.
    """

    runner: TaskRunner
    _threads: ThreadPoolExecutor | None = field(default=None, init=False)

    def judge(self, tasks: Sequence[WorkflowTask], episodes: Sequence[Episode]) -> Future[list[Episode]]:
        """Judge a group (see `GroupJudge`)."""
        if self.runner.judge_inline:
            done: Future[list[Episode]] = Future()
            done.set_result(judge_here(self.runner, tasks, episodes))
            return done
        self._threads = self._threads or ThreadPoolExecutor(_GROUPS_AT_ONCE, "judge of groups")
        return self._threads.submit(judge_here, self.runner, tasks, episodes)

    def close(self) -> None:
        """Judge no further group."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


def judge_here(runner: TaskRunner, tasks: Sequence[WorkflowTask], episodes: Sequence[Episode]) -> list[Episode]:
    """Return the episodes of a group, judged in this thread."""
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
    return asyncio.run(judging)
