"""Task order and learning rate. Without a sampler, they depend on the configuration and the step only."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from astuner.backbone.training.task_sampling import TaskSampler
from astuner.config.optimizer import OptimConfig
from astuner.config.root import AstunerConfig
from astuner.schema import Task, TaskSet


@dataclass(frozen=True)
class TaskOrder:
    """Batches of tasks, epoch after epoch. Without a sampler, the last batch of an epoch may be smaller.

    Attributes:
        tasks: all training tasks.
        batch_size: tasks per step.
        seed: shuffles each epoch differently; None keeps the order of the data.
        sampler: draws the batches, if they depend on weights of readers or on the success of earlier steps. An epoch is
            then as many steps as without it.
    """

    tasks: Sequence[Task]
    batch_size: int
    seed: int | None
    sampler: TaskSampler | None = None

    @staticmethod
    def from_config(config: AstunerConfig, tasks: TaskSet, steps_ahead: int = 0) -> TaskOrder:
        """Return the configured order of the training tasks.

        Args:
            config: the configuration.
            tasks: the tasks of the run.
            steps_ahead: how many batches may start before the results of a step are known.
        """
        seed = config.trainer_common.seed if config.data.shuffle else None
        sampler = TaskSampler.from_config(config, tasks, steps_ahead)
        return TaskOrder(tasks.training, config.data.train_batch_size, seed, sampler)

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches in one pass over the tasks."""
        return math.ceil(len(self.tasks) / self.batch_size)

    def total_steps(self, epochs: int, limit: int | None) -> int:
        """Return the number of steps in a run."""
        steps = self.steps_per_epoch * epochs
        return steps if limit is None else min(steps, limit)

    def batch(self, step: int) -> list[Task]:
        """Return the tasks of training step `step` (1-based)."""
        if self.sampler is not None:
            return self.sampler.batch(step)
        epoch, index = divmod(step - 1, self.steps_per_epoch)
        order = range(len(self.tasks)) if self.seed is None else _shuffled(len(self.tasks), self.seed, epoch)
        start = index * self.batch_size
        return [self.tasks[i] for i in order[start : start + self.batch_size]]

    def further_tasks(self, count: int, taken: Sequence[Task]) -> list[Task]:
        """Return up to `count` tasks for the latest step in addition to those that it has; needs the sampler."""
        assert self.sampler is not None
        return self.sampler.further_tasks(count, taken)


@lru_cache(maxsize=1)
def _shuffled(count: int, seed: int, epoch: int) -> tuple[int, ...]:
    """Return an epoch's task order. Shuffling 100,000 tasks in each step would take 60 ms."""
    order = list(range(count))
    random.Random(f"{seed}|epoch|{epoch}").shuffle(order)
    return tuple(order)


def learning_rate(config: OptimConfig, total_steps: int, step: int) -> float:
    """Return the learning rate of training step `step` (1-based): linear warm-up, then the schedule.

    The step after the warm-up has the full rate. The last step has the rate at which the schedule ends.
    """
    if step <= config.lr_warmup_steps:
        return config.lr * step / (config.lr_warmup_steps + 1)
    span = max(total_steps - config.lr_warmup_steps - 1, 1)
    done = min((step - 1 - config.lr_warmup_steps) / span, 1.0)
    shape = {
        "constant": 1.0,
        "linear": 1.0 - done,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * done)),
    }[config.lr_scheduler]
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * shape)
