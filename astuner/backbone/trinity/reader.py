"""The tasks of a run, as Trinity's explorer reads them (`storage_type`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trinity.buffer.buffer_reader import BufferReader
from trinity.common.workflows import Task

from astuner.backbone.trinity.desk import desk
from astuner.backbone.trinity.workflow import PLACE, REQUEST, EpisodeWorkflow
from astuner.task_rollout import BatchRequest


class TrainingReader(BufferReader):
    """Gives the batches of the training steps, in the order that every backbone has."""

    def __init__(self, config: Any) -> None:
        self._step: int | None = None

    async def read(self, batch_size: int | None = None, **_: Any) -> list[Task]:
        """Return the next step's tasks, once it may be begun."""
        if self._step is None:
            self._step = await desk().first_step.remote()
        request, share = await desk().batch.remote(self._step)
        self._step += 1
        return trinity_tasks(request, share, is_eval=False)

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
        request, share = await desk().requested.remote()
        return trinity_tasks(request, share, is_eval=True)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing to go on from."""
        return {"current_index": 0}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Do nothing."""


def trinity_tasks(request: BatchRequest, share: int, *, is_eval: bool) -> list[Task]:
    """Return a batch as Trinity has it, in shares.

    Args:
        request: the batch.
        share: how many tasks a runner is given at a time.
        is_eval: whether nothing is trained of it.
    """
    tasks = list(request.tasks)
    return [
        Task(
            workflow=EpisodeWorkflow,
            repeat_times=request.repeats,
            raw_task={REQUEST: replace(request, tasks=tasks[place : place + share])},
            is_eval=is_eval,
            index={PLACE: place},
        )
        for place in range(0, len(tasks), share)
    ]
