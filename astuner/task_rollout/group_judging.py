"""Judges a task's episodes together, when all of them have ended."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from astuner.debugging.breakpoints import is_debugged
from astuner.schema import Episode, WorkflowTask
from astuner.task_judge.judge_base import BaseGroupJudge
from astuner.task_runner import TaskRunner, is_unjudged, judge_group

_GROUPS_AT_ONCE = 32
_Judged = list[tuple[int, Episode]]


@dataclass
class GroupJudging:
    """Collects the episodes of a batch that wait for their group, and judges complete groups in threads.

    Attributes:
        runner: judges the groups.
        tasks: the task of each episode of the batch.
    """

    runner: TaskRunner
    tasks: Sequence[WorkflowTask]
    _left: Counter[str] = field(init=False)
    _waiting: dict[str, list[tuple[int, WorkflowTask, Episode]]] = field(default_factory=dict, init=False)
    _running: list[Future[_Judged]] = field(default_factory=list, init=False)
    _threads: ThreadPoolExecutor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._left = Counter(task.task_id for task in self.tasks)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=error is None, cancel_futures=True)

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
        if self.runner.judge_inline:
            done: Future[_Judged] = Future()
            done.set_result(self._judge(group))
            self._running.append(done)
            return
        self._threads = self._threads or ThreadPoolExecutor(_GROUPS_AT_ONCE, "judge of groups")
        self._running.append(self._threads.submit(self._judge, group))

    def judged(self, *, wait: bool = False) -> Iterator[tuple[int, Episode]]:
        """Yield the index and the result of each episode that has been judged since the last call.

        Args:
            wait: wait for the groups that are being judged.
        """
        done = [future for future in (as_completed(self._running) if wait else self._running) if future.done()]
        self._running = [future for future in self._running if future not in done]
        for future in done:
            yield from future.result()

    def _judge(self, group: Sequence[tuple[int, WorkflowTask, Episode]]) -> _Judged:
        indexes, tasks, episodes = zip(*group, strict=True)
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
        return list(zip(indexes, asyncio.run(judging), strict=True))
