"""The Ray actor between the launcher and Trinity's processes: it hands out tasks, and takes what comes of them.

Trinity's explorer, runners and trainer are processes that Trinity starts; they find the desk by its name.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from astuner.backbone.episode_worker import AgentJob
from astuner.backbone.task_order import TaskOrder
from astuner.backbone.trinity.news import Ended, Measured, News
from astuner.schema import Episode
from astuner.task_rollout import BatchRequest

_NAME = "astuner-desk"
TRAINER, EXPLORER = "trainer", "explorer"
"""Trinity's names of its two roles."""
SAMPLER = f"{EXPLORER}_rollout_model_0_0"
"""The same, of its first rollout model; all of them have the same weights."""


@dataclass(frozen=True)
class DeskJob:
    """What the processes of a run need to know.

    Attributes:
        agent: for those that run episodes.
        tinker: whether the engine is a Tinker service, and not vLLM.
        max_model_len: tokens, prompt and answer together.
        updates: optimiser steps of a training step.
        runners: processes that run episodes.
    """

    agent: AgentJob
    tinker: bool
    max_model_len: int
    updates: int
    runners: int


@dataclass(frozen=True)
class Course:
    """The training steps that are to be done.

    Attributes:
        order: which tasks each takes.
        request: of each batch, but for tasks and step.
        done, last: steps that were done before, and the number of the last one.
        ahead: how many batches may be begun before the weights have learned from the one before them.
        stale: how many steps the weights that a batch is sampled with may be behind.
        hold: after every so many steps the explorer waits until it is told to go on.
    """

    order: TaskOrder
    request: BatchRequest
    done: int
    last: int
    ahead: int
    stale: int
    hold: int


@dataclass(frozen=True)
class Batch:
    """Episodes for the explorer to run.

    Attributes:
        request: which.
        share: how many tasks a runner takes at a time.
        least_version: the oldest weights, by the trainer's own steps, that they may be sampled with.
        comes: whether newer weights come by themselves, and are not to be asked for.
    """

    request: BatchRequest
    share: int
    least_version: int
    comes: bool = False


class Desk:
    """Hands out batches and keeps news for the launcher. All methods run in one event loop."""

    def __init__(self, job: DeskJob) -> None:
        self._job = job
        self._course: Course | None = None
        self._request: BatchRequest | None = None
        self._news: list[News] = []
        self._usable: dict[int, list[Episode]] = defaultdict(list)
        self._trained = self._held_until = 0
        self._changed = asyncio.Condition()

    async def job(self) -> DeskJob:
        """Return what the processes need to know."""
        return self._job

    async def begin(self, course: Course) -> None:
        """Let the explorer begin."""
        self._course, self._trained, self._held_until = course, course.done, course.done
        await self._tell_all()

    async def go_on(self, step: int) -> None:
        """Let the explorer go on after `step`, where it was to wait."""
        self._held_until = step
        await self._tell_all()

    async def ask(self, request: BatchRequest) -> None:
        """Have the next evaluation of the explorer's be of `request`."""
        self._request = request

    async def requested(self) -> Batch:
        """Return what an evaluation is of."""
        assert self._request is not None
        return Batch(self._request, self._share(self._request), 0)

    async def first_step(self) -> int:
        """Return the number of the first training step that is to be done."""
        return (self._course.done if self._course else 0) + 1

    async def batch(self, step: int) -> Batch:
        """Return the batch of training step `step`, once it may be begun; beyond the last step that is never.

        Fully asynchronous, Trinity hands a batch's experiences over only when others are begun, so that empty ones
        follow the last.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._may_begin(step))
        course = self._course
        assert course is not None
        tasks = course.order.batch(step) if step <= course.last else ()
        request = replace(course.request, tasks=tasks, step=step)
        least = max(min(step, course.last) - 1 - course.stale, course.done) * self._job.updates
        return Batch(request, self._share(request), least, comes=self._is_fully_async)

    @property
    def _is_fully_async(self) -> bool:
        return self._job.agent.config.asynchrony.sync_style == "fully_async"

    def _share(self, request: BatchRequest) -> int:
        """Return how many tasks a runner takes at a time: all runners have some, and none more than it can run."""
        config = self._job.agent.config
        if config.asynchrony.over_rollout:
            return 1  # what is given up is what a runner has
        room = max(1, config.rollout.max_env_worker // request.repeats)
        return max(1, min(room, math.ceil(len(request.tasks) / self._job.runners)))

    def _may_begin(self, step: int) -> bool:
        course = self._course
        if course is None:
            return False
        if step > course.last:
            return self._is_fully_async and step <= course.last + course.ahead
        if step - 1 - self._trained > course.ahead:
            return False
        return (step - 1) // course.hold * course.hold <= self._held_until

    async def post(self, news: News) -> None:
        """Take news for the launcher."""
        if isinstance(news, Ended) and news.split == "train" and news.episode.status == "ok":
            self._usable[news.step].append(news.episode)
        if isinstance(news, Measured) and news.role == TRAINER:
            self._trained = max(self._trained, news.number // self._job.updates)
        self._news.append(news)
        await self._tell_all()

    async def take_usable(self, step: int) -> list[Episode]:
        """Return the episodes of a training step that can be learned from, by task and then repeat; only once."""
        assert self._course is not None
        place = {task.task_id: index for index, task in enumerate(self._course.order.batch(step))}
        return sorted(self._usable.pop(step, []), key=lambda one: (place[one.task.task_id], one.repeat_index))

    async def read(self, patience: float) -> Sequence[News]:
        """Return what has come since the last call, in order; wait up to `patience` seconds for some."""
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(lambda: self._news), patience)
            except TimeoutError:
                return ()
        news, self._news = self._news, []
        return news

    async def _tell_all(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def open_desk(job: DeskJob) -> Any:
    """Start the desk of this Ray's namespace."""
    return ray.remote(Desk).options(name=_NAME, num_cpus=0, max_concurrency=1000).remote(job)


def desk() -> Any:
    """Return the desk of the run that this process belongs to."""
    return ray.get_actor(_NAME)
