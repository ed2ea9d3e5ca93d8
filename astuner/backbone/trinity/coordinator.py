"""The Ray actor through which the launcher and Trinity's processes exchange tasks and events, and the events.

Trinity starts its explorer, runners and trainer itself; they look the coordinator up by name.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from astuner.backbone.episode_workers.messages import AgentJob, BreakpointsReached, LogRecord
from astuner.backbone.ray_cluster.nodes import on_this_node
from astuner.backbone.training.schedule import TaskOrder
from astuner.schema import Episode, Split
from astuner.task_rollout.rollout import BatchRequest

SampleKey = tuple[str, int]
"""The id of an episode and the index of a sample in it."""

Digests = Mapping[SampleKey, str]
"""Digests of samples that have trained tokens; see `sample_digest`."""


@dataclass(frozen=True)
class EpisodesStarted:
    """An actor has started to run episodes."""

    actor_id: str
    actor: Any


@dataclass(frozen=True)
class EpisodeFinished:
    """An episode has ended."""

    split: Split
    step: int
    episode: Episode


@dataclass(frozen=True)
class ShareFinished:
    """A runner has finished its share of a batch; an `EpisodeFinished` was sent for each episode before.

    Attributes:
        episodes: number of episodes in the share.
        attempts: failed attempts at episodes that were retried.
    """

    split: Split
    step: int
    episodes: int
    attempts: Sequence[Episode]


@dataclass(frozen=True)
class WorkerFailed:
    """An error ends the run; if it has a `step`, once the steps before that one are trained."""

    error: Exception
    step: int | None = None


@dataclass(frozen=True)
class AdvantagesReady:
    """The advantages of a training step are computed and its experiences wait for the trainer.

    Attributes:
        episode_ids: the episodes that are trained, in the order of `result`.
        result: an `UpdateResult` without the update's metrics; None if no episode can be trained.
        sample_keys: the samples that have a gradient.
    """

    step: int
    episode_ids: tuple[str, ...]
    result: Any
    sample_keys: frozenset[SampleKey]


@dataclass(frozen=True)
class BatchConsumed:
    """The trainer has read the experiences for one trainer step.

    Attributes:
        trainer_step: the trainer's step. A training step consists of `mini_batch_num` trainer steps.
    """

    trainer_step: int
    digests: Digests


@dataclass(frozen=True)
class MetricsLogged:
    """Trinity has logged metrics.

    Attributes:
        role: `trainer` or `explorer`.
        values: metrics under Trinity's names.
    """

    role: str
    step: int
    values: Mapping[str, float]


Event = (
    EpisodesStarted
    | EpisodeFinished
    | ShareFinished
    | LogRecord
    | BreakpointsReached
    | WorkerFailed
    | AdvantagesReady
    | BatchConsumed
    | MetricsLogged
)


_NAME = "astuner-coordinator"
TRAINER, EXPLORER = "trainer", "explorer"
"""Trinity's names of its two actors."""
ROLLOUT_MODEL = f"{EXPLORER}_rollout_model_0_0"
"""The actor name of Trinity's first rollout model; all rollout models have the same weights."""


@dataclass(frozen=True)
class CoordinatorJob:
    """Settings that Trinity's processes read from the coordinator.

    Attributes:
        agent: the job of processes that run episodes; its `rollout.max_env_worker` is the share of one process.
        uses_tinker: whether a Tinker service samples; otherwise vLLM does.
        runners: number of processes that run episodes, of all engines together.
    """

    agent: AgentJob
    uses_tinker: bool
    max_model_len: int
    updates: int
    runners: int
    teacher_path: str | None = None


@dataclass(frozen=True)
class StepSchedule:
    """A run's training steps, and how far the explorer may run ahead of the trainer.

    Attributes:
        request: the request of each batch, without tasks and step.
        steps_done: training steps done before the run was resumed.
        max_steps_ahead: how many batches may start before the trainer has trained on the one before them.
        max_staleness: by how many steps the sampling weights may be behind.
        pause_every: the explorer pauses after every so many steps until `resume_after` is called.
    """

    order: TaskOrder
    request: BatchRequest
    steps_done: int
    last_step: int
    max_steps_ahead: int
    max_staleness: int
    pause_every: int


@dataclass(frozen=True)
class TaskBatch:
    """A batch of episodes for the explorer.

    Attributes:
        shares: number of parts, which are nearly equally large; one runner takes each. They consist of whole tasks
            unless there are more parts than tasks.
        min_version: the oldest weights to sample with, counted in the trainer's own steps.
        weights_pushed: True if the trainer pushes weights; False if the explorer must pull them.
    """

    request: BatchRequest
    shares: int
    min_version: int
    weights_pushed: bool = False


class Coordinator:
    """Schedules batches and buffers events for the launcher. All methods run in one event loop."""

    def __init__(self, job: CoordinatorJob) -> None:
        self._job = job
        self._schedule: StepSchedule | None = None
        self._evaluation: BatchRequest | None = None
        self._events: list[Event] = []
        self._usable_episodes: dict[int, list[Episode]] = defaultdict(list)
        self._trained_steps = self._started_steps = self._paused_after = 0
        self._is_ended = False
        self._changed = asyncio.Condition()

    async def job(self) -> CoordinatorJob:
        """Return the settings for Trinity's processes."""
        return self._job

    async def start_training(self, schedule: StepSchedule) -> None:
        """Set the schedule, which lets the explorer start."""
        self._schedule = schedule
        self._trained_steps = self._started_steps = self._paused_after = schedule.steps_done
        await self._notify_all()

    async def resume_after(self, step: int) -> None:
        """Let the explorer continue after its pause at `step`."""
        self._paused_after = step
        await self._notify_all()

    async def may_update(self, trainer_step: int) -> bool:
        """Return whether the trainer may do a step. After `end_training`, it may only finish the last training step."""
        return not self._is_ended or math.ceil(trainer_step / self._job.updates) <= self._started_steps

    async def start_update(self, batch: BatchConsumed) -> bool:
        """Return whether the trainer may train on a mini-batch that it has read. If so, report it to the launcher."""
        if not await self.may_update(batch.trainer_step):
            return False
        self._started_steps = max(self._started_steps, math.ceil(batch.trainer_step / self._job.updates))
        await self.post_event(batch)
        return True

    async def end_training(self, ready_step: int) -> int:
        """Let no further batch start, and no update after `ready_step`. Return the last step that is trained.

        Args:
            ready_step: the last training step that is finished, or whose episodes are complete.
        """
        self._is_ended = True
        self._started_steps = max(self._started_steps, ready_step)
        await self._notify_all()
        return self._started_steps

    async def wait_until_ended(self) -> None:
        """Wait for a call of `end_training`."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._is_ended)

    async def record_success(self, step: int, success_rates: Mapping[str, float]) -> None:
        """Take a training step's results, which may determine the tasks in later steps."""
        assert self._schedule is not None
        if self._schedule.order.sampler is not None:
            self._schedule.order.sampler.record(step, success_rates)
        await self._notify_all()

    async def request_evaluation(self, request: BatchRequest) -> None:
        """Set the batch of the explorer's next evaluation."""
        self._evaluation = request

    async def evaluation_batch(self) -> TaskBatch:
        """Return the batch set by `request_evaluation`."""
        assert self._evaluation is not None
        return TaskBatch(self._evaluation, self._shares(self._evaluation), 0)

    async def first_step(self) -> int:
        """Return the number of the first training step to run."""
        return (self._schedule.steps_done if self._schedule else 0) + 1

    async def training_batch(self, step: int) -> TaskBatch:
        """Wait until the batch of training step `step` may start, and return it.

        Batches beyond the last step never start, except in `fully_async`: there Trinity delivers a batch's experiences
        only when later batches start, so that empty batches follow the last one.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._can_start(step))
        schedule = self._schedule
        assert schedule is not None
        tasks = schedule.order.batch(step) if step <= schedule.last_step else ()
        request = replace(schedule.request, tasks=tasks, step=step)
        min_step = max(min(step, schedule.last_step) - 1 - schedule.max_staleness, schedule.steps_done)
        return TaskBatch(
            request, self._shares(request), min_step * self._job.updates, weights_pushed=self._is_fully_async
        )

    @property
    def _is_fully_async(self) -> bool:
        return self._job.agent.config.asynchrony.sync_style == "fully_async"

    def _shares(self, request: BatchRequest) -> int:
        """Return a number of shares that keeps every runner busy, and none larger than it can run concurrently.

        Trinity binds each runner to an engine, so that a runner without a share is an idle engine. The episodes of a
        task stay together, because they have a prompt in common, unless there are fewer tasks than runners.
        """
        config, tasks, runners = self._job.agent.config, len(request.tasks), self._job.runners
        if config.asynchrony.over_rollout:
            return tasks  # over_rollout drops whole shares
        workers = config.rollout.max_env_worker
        units, capacity = tasks, max(1, workers // request.repeats)
        if tasks < runners:
            units, capacity = tasks * request.repeats, workers
        return min(units, math.ceil(units / (capacity * runners)) * runners)

    def _can_start(self, step: int) -> bool:
        schedule = self._schedule
        if schedule is None or self._is_ended:
            return False
        if step > schedule.last_step:
            return self._is_fully_async and step <= schedule.last_step + schedule.max_steps_ahead
        if step - 1 - self._trained_steps > schedule.max_steps_ahead:
            return False
        if schedule.order.sampler is not None and not schedule.order.sampler.is_ready(step):
            return False
        return (step - 1) // schedule.pause_every * schedule.pause_every <= self._paused_after

    async def post_event(self, event: Event) -> None:
        """Queue an event for the launcher."""
        if isinstance(event, EpisodeFinished) and event.split == "train" and event.episode.status == "ok":
            self._usable_episodes[event.step].append(event.episode)
        if isinstance(event, MetricsLogged) and event.role == TRAINER:
            self._trained_steps = max(self._trained_steps, event.step // self._job.updates)
        self._events.append(event)
        await self._notify_all()

    async def pop_usable_episodes(self, step: int) -> list[Episode]:
        """Remove and return the successful episodes of a training step, ordered by task and repeat."""
        assert self._schedule is not None
        position = {task.task_id: index for index, task in enumerate(self._schedule.order.batch(step))}
        episodes = self._usable_episodes.pop(step, [])
        return sorted(episodes, key=lambda episode: (position[episode.task.task_id], episode.repeat_index))

    async def read_events(self, timeout: float) -> Sequence[Event]:
        """Return the events since the last call, in order; wait up to `timeout` seconds for the first."""
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(lambda: self._events), timeout)
            except TimeoutError:
                return ()
        events, self._events = self._events, []
        return events

    async def _notify_all(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def start_coordinator(job: CoordinatorJob) -> Any:
    """Start the coordinator on this process's node, in its Ray namespace, and return its handle."""
    # Ray would put it on any node, and the run would end with that node.
    return ray.remote(Coordinator).options(name=_NAME, max_concurrency=1000, **on_this_node()).remote(job)


def coordinator() -> Any:
    """Return the handle of the run's coordinator."""
    return ray.get_actor(_NAME)
