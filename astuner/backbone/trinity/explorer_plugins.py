"""Classes that Trinity's explorer and its runners load by name: task readers and the workflow that runs episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import ray
from trinity.buffer.buffer_reader import BufferReader
from trinity.common.experience import Experience
from trinity.common.workflows import Task, Workflow

from astuner.backbone.trinity.advantage_fn import empty_experience, experiences
from astuner.backbone.trinity.coordinator import (
    EXPLORER,
    ROLLOUT_MODEL,
    EpisodesStarted,
    TaskBatch,
    WorkerFailed,
    coordinator,
)
from astuner.backbone.trinity.engines import current_weights
from astuner.backbone.trinity.episode_runner import EpisodeRunner
from astuner.errors import AstunerError, BackboneError
from astuner.task_rollout.rollout import BatchRequest

_POLL_SECONDS = 0.1
_REQUEST, _FIRST_TASK = "request", "place"
"""Keys in a Trinity task's `raw_task` and `index`: the batch's share, and the index of its first task."""


class TrainingReader(BufferReader):
    """Reads the batches of the training steps from the coordinator (`storage_type`)."""

    def __init__(self, config: Any) -> None:
        self._step: int | None = None

    async def read(self, batch_size: int | None = None, **_: Any) -> list[Task]:
        """Wait until the next step's batch may start, and return its tasks."""
        if self._step is None:
            self._step = await coordinator().first_step.remote()
        batch: TaskBatch = await coordinator().training_batch.remote(self._step)
        await _update_weights(batch)
        self._step += 1
        return _trinity_tasks(batch, is_eval=False)

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state: the coordinator knows the next step."""
        return {"current_index": 0}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Do nothing: the coordinator knows the next step."""


class EvaluationReader(BufferReader):
    """Reads the batch that the launcher requested, for a validation or a dry run (`storage_type`)."""

    def __init__(self, config: Any) -> None:
        self._is_read = False

    async def read(self, batch_size: int | None = None, **_: Any) -> list[Task]:
        """Return all tasks on the first call; raise StopAsyncIteration on the second."""
        if self._is_read:
            raise StopAsyncIteration
        self._is_read = True
        return _trinity_tasks(await coordinator().evaluation_batch.remote(), is_eval=True)

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state: an evaluation is not resumed."""
        return {"current_index": 0}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Do nothing: an evaluation is not resumed."""


async def _update_weights(batch: TaskBatch) -> None:
    """Update the weights of the explorer (this process) if they are too old for a batch.

    The explorer pulls the newest weights after each step, but they age while it waits for its next batch. In
    `fully_async` the explorer receives every version, and a second pull would wait for weights already received.
    """
    model = ray.get_actor(ROLLOUT_MODEL)
    # Trinity's version of the base model is -1.
    while max(await model.get_model_version.remote(), 0) < batch.min_version:
        if batch.weights_pushed:
            await asyncio.sleep(_POLL_SECONDS)
        else:
            await ray.get_actor(EXPLORER).sync_weight.remote()


def _trinity_tasks(batch: TaskBatch, *, is_eval: bool) -> list[Task]:
    request, tasks, shares = batch.request, list(batch.request.tasks), batch.shares
    episodes, repeats = request.episodes(), request.repeats
    unit = repeats if shares <= len(tasks) else 1
    bounds = [len(episodes) // unit * share // shares * unit for share in range(shares + 1)] if shares else []
    return [
        Task(
            workflow=EpisodeWorkflow,
            repeat_times=repeats,
            raw_task={
                _REQUEST: replace(
                    request,
                    tasks=tasks[start // repeats : -(-end // repeats)],
                    only=frozenset((task.task_id, repeat) for task, repeat in episodes[start:end]),
                )
            },
            is_eval=is_eval,
            index={_FIRST_TASK: start // repeats},
        )
        for start, end in pairwise(bounds)
    ]


class EpisodeWorkflow(Workflow):
    """Runs a share's episodes concurrently, with the local backbone's code (`default_workflow_type`)."""

    is_async = True
    can_repeat = True

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        """Do nothing, because a share names its episodes."""

    async def run_async(self) -> list[Experience]:
        """Run the episodes, report them to the launcher, and return the experiences of those with a reward."""
        request: BatchRequest = self.task.raw_task[_REQUEST]
        context = ray.get_runtime_context()
        started = EpisodesStarted(context.get_actor_id(), context.current_actor)
        await coordinator().post_event.remote(started)
        try:
            runner = await asyncio.to_thread(_episode_runner)
            weights = await current_weights(self.model, uses_tinker=runner.job.uses_tinker)
            episodes = await asyncio.to_thread(runner.run, request, weights, started)
        # Trinity only logs the error; the launcher must receive it.
        except Exception as error:
            failure: AstunerError = BackboneError(f"an episode runner raised {type(error).__name__}: {error}")
            if isinstance(error, AstunerError):
                failure = type(error)(str(error))  # any process can unpickle it
            await coordinator().post_event.remote(WorkerFailed(failure))
            raise
        task_indices = {task.task_id: self.task.index[_FIRST_TASK] + index for index, task in enumerate(request.tasks)}
        exps = [
            exp
            for episode in episodes
            for exp in experiences(episode, request.step, task_indices[episode.task.task_id])
        ]
        return exps or [empty_experience(request.step)]  # Trinity treats an empty list as an error


@cache
def _episode_runner() -> EpisodeRunner:
    return EpisodeRunner(ray.get(coordinator().job.remote()))
