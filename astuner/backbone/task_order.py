"""Which tasks each training step takes: a function of the seed and the step alone, so that a resumed run agrees."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from astuner.schema import Task


@dataclass(frozen=True)
class TaskOrder:
    """Batches of tasks, epoch after epoch; the last batch of an epoch may be smaller.

    Attributes:
        tasks: all training tasks.
        batch_size: tasks per step.
        seed: shuffles each epoch anew, None keeps the order of the data.
    """

    tasks: Sequence[Task]
    batch_size: int
    seed: int | None

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches in one pass over the tasks."""
        return math.ceil(len(self.tasks) / self.batch_size)

    def total_steps(self, epochs: int, limit: int | None) -> int:
        """Return the number of steps of a run."""
        steps = self.steps_per_epoch * epochs
        return steps if limit is None else min(steps, limit)

    def batch(self, step: int) -> list[Task]:
        """Return the tasks of training step `step` (1-based)."""
        epoch, place = divmod(step - 1, self.steps_per_epoch)
        order = list(range(len(self.tasks)))
        if self.seed is not None:
            random.Random(f"{self.seed}|epoch|{epoch}").shuffle(order)
        start = place * self.batch_size
        return [self.tasks[index] for index in order[start : start + self.batch_size]]
