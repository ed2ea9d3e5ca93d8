"""The tasks of a run, as Trinity's explorer reads them (`storage_type`)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ray
from trinity.buffer.buffer_reader import BufferReader
from trinity.common.workflows import Task

from astuner.backbone.trinity.desk import EXPLORER, SAMPLER, Batch, desk
from astuner.backbone.trinity.workflow import PLACE, REQUEST, EpisodeWorkflow

_POLL_SECONDS = 0.1


class TrainingReader(BufferReader):
    """Gives the batches of the training steps, in the order that every backbone has."""

    def __init__(self, config: Any) -> None:
        self._step: int | None = None

    async def read(self, batch_size: int | None = None, **_: Any) -> list[Task]:
        """Return the next step's tasks, once it may be begun."""
        if self._step is None:
            self._step = await desk().first_step.remote()
        batch: Batch = await desk().batch.remote(self._step)
        await _take_weights(batch)
        self._step += 1
        return trinity_tasks(batch, is_eval=False)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing to go on from: the run's record knows."""
        return {"current_index": 0}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Do nothing."""


class RequestReader(BufferReader):
    """Gives the tasks of what the launcher asks for: a validation, or a dry run."""

    def __init__(self, config: Any) -> None:
        self._read = False

    async def read(self, batch_size: int | None = None, **_: Any) -> list[Task]:
        """Return all tasks at the first call.

        Raises:
            StopAsyncIteration: at the second.
        """
        if self._read:
            raise StopAsyncIteration
        self._read = True
        return trinity_tasks(await desk().requested.remote(), is_eval=True)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing to go on from."""
        return {"current_index": 0}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Do nothing."""


async def _take_weights(batch: Batch) -> None:
    """Have the explorer, whose process this is, take newer weights where its own are too old for a batch.

    It takes the newest after each of its steps; but while it waits to begin the next one, those grow old. Fully
    asynchronous, it takes all, and a second taker would wait for weights that the first has got.
    """
    model = ray.get_actor(SAMPLER)
    # The model that training begins with is -1 to Trinity.
    while max(await model.get_model_version.remote(), 0) < batch.least_version:
        if batch.comes:
            await asyncio.sleep(_POLL_SECONDS)
        else:
            await ray.get_actor(EXPLORER).sync_weight.remote()


def trinity_tasks(batch: Batch, *, is_eval: bool) -> list[Task]:
    """Return a batch as Trinity has it, in shares.

    Args:
        batch: the batch.
        is_eval: whether nothing is trained of it.
    """
    request = batch.request
    tasks = list(request.tasks)
    return [
        Task(
            workflow=EpisodeWorkflow,
            repeat_times=request.repeats,
            raw_task={REQUEST: replace(request, tasks=tasks[place : place + batch.share])},
            is_eval=is_eval,
            index={PLACE: place},
        )
        for place in range(0, len(tasks), batch.share)
    ]
