"""The tasks and the learning rate of each step.

They depend on the configuration and the step only, unless a `TaskSampler` draws the tasks by reader weights or by
earlier steps' results.
"""

from __future__ import annotations

import copy
import heapq
import math
import random
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache

from loguru import logger

from astuner.backbone.training.run_state import LeftOutTask, SamplingState, SourceState
from astuner.config.root import AstunerConfig
from astuner.config.task_selection import CurriculumConfig, DifficultyFilter
from astuner.config.trainer import OptimConfig
from astuner.schema import Task, TaskSet

# Batches that may be asked for again: of steps whose episodes are still running or waiting for the trainer.
_BATCHES_KEPT = 64


@dataclass(eq=False)
class TaskSampler:
    """Draws batches without duplicates. They depend on the seed and on the results of earlier steps only.

    The readers of a mixture share the draws in proportion to their weights. Without a curriculum, the draws from a
    reader pass over its tasks again and again, in a new order each time.

    Attributes:
        weights: the weights of the readers by `Task.source`; empty without a mixture.
        shuffle: whether passes have a random order.
        difficulty: leaves out tasks that are always or never solved; None to leave out none.
        curriculum: draws tasks by their success; None to pass over them.
        steps_ahead: how many batches are drawn before the results of a step are known.
    """

    tasks: Sequence[Task]
    _: KW_ONLY
    weights: Mapping[str, float]
    batch_size: int
    seed: int
    shuffle: bool
    difficulty: DifficultyFilter | None = None
    curriculum: CurriculumConfig | None = None
    steps_ahead: int = 0

    def __post_init__(self) -> None:
        self._tasks = {task.task_id: task for task in self.tasks}
        self._ids: dict[str, list[str]] = {}
        for task in self.tasks:
            self._ids.setdefault(task.source if self.weights else "", []).append(task.task_id)
        self._weights = {name: self.weights.get(name, 1.0) for name in self._ids}
        self._state = SamplingState(sources={name: SourceState() for name in self._ids})
        self._orders: dict[str, tuple[int, list[str]]] = {}
        self._drawn: dict[int, list[Task]] = {}

    @staticmethod
    def from_config(config: AstunerConfig, tasks: TaskSet, steps_ahead: int) -> TaskSampler | None:
        """Return the sampler that a configuration needs; None if its batches depend on nothing but the epoch."""
        reader = config.task_reader
        difficulty = next((entry for entry in reader.filters if isinstance(entry, DifficultyFilter)), None)
        curriculum = reader.curriculum if reader.curriculum.enable else None
        refills = config.trainer_common.algorithm.dynamic_sampling == "refill"
        if not tasks.weights and difficulty is None and curriculum is None and not refills:
            return None
        return TaskSampler(
            tasks.training,
            weights=tasks.weights,
            batch_size=config.data.train_batch_size,
            seed=config.trainer_common.seed,
            shuffle=config.data.shuffle,
            difficulty=difficulty,
            curriculum=curriculum,
            steps_ahead=steps_ahead,
        )

    def state(self) -> SamplingState:
        """Return a copy of the state, for a checkpoint."""
        return copy.deepcopy(self._state)

    def restore(self, state: SamplingState) -> None:
        """Continue from the state of a checkpoint. Tasks that are gone are ignored."""
        self._state = copy.deepcopy(state)
        for name in self._ids:
            self._state.sources.setdefault(name, SourceState())
        self._drawn.clear()

    def is_ready(self, step: int) -> bool:
        """Return whether the results on which the batch of a step depends are known."""
        return not self._uses_results or self._state.recorded >= step - 1 - self.steps_ahead

    def record(self, step: int, success_rates: Mapping[str, float]) -> None:
        """Take the results of a step.

        Args:
            step: 1-based; each step is recorded once, in order.
            success_rates: the share of successful episodes by task id, for the tasks with a scored episode.
        """
        if self._uses_results:
            self._state.recorded = step
            self._state.waiting[step] = dict(success_rates)

    def metrics(self) -> dict[str, float]:
        """Return how many tasks the difficulty filter leaves out, by cause."""
        if self.difficulty is None:
            return {}
        causes = [task.cause for task in self._state.left_out.values()]
        return {"tasks/too_easy": causes.count("too easy"), "tasks/too_hard": causes.count("too hard")}

    def batch(self, step: int) -> list[Task]:
        """Return the tasks of training step `step` (1-based), at most a few before the last one that was asked for."""
        while self._state.step < step:
            self._state.step += 1
            self._drawn[self._state.step] = self._draw(self._state.step)
            self._drawn.pop(self._state.step - self.steps_ahead - _BATCHES_KEPT, None)
        return self._drawn[step]

    def further_tasks(self, count: int, taken: Sequence[Task]) -> list[Task]:
        """Return the next `count` tasks for the step whose batch was drawn last, or fewer if there are not as many.

        They are none of `taken`, which the step already has. Later batches continue after them.
        """
        return self._next(count, {task.task_id for task in taken})

    @property
    def _uses_results(self) -> bool:
        return self.difficulty is not None or self.curriculum is not None

    def _draw(self, step: int) -> list[Task]:
        self._take_results(step)
        left_out = self._state.left_out
        if left_out.keys() >= self._tasks.keys():
            logger.warning("step {}: the difficulty filter leaves out all tasks, so all of them come back", step)
            for task in left_out:
                self._state.recent.pop(task, None)
            left_out.clear()
        return self._next(self.batch_size, set())

    def _next(self, size: int, taken: Set[str]) -> list[Task]:
        unusable = self._state.left_out.keys() | taken
        active = {name: [task for task in ids if task not in unusable] for name, ids in self._ids.items()}
        picks = self._shares({name: len(ids) for name, ids in active.items()}, size)
        draws: dict[str, Iterator[str]] = {}
        for name in dict.fromkeys(picks):
            count = picks.count(name)
            if self.curriculum is None:
                draws[name] = iter(self._pass(name, count, taken))
            else:
                draws[name] = iter(self._by_success(name, active[name], count, len(taken)))
        return [self._tasks[next(draws[name])] for name in picks]

    def _shares(self, available: Mapping[str, int], size: int) -> list[str]:
        """Return a reader for each of `size` tasks, by smooth weighted round robin.

        Where a reader has fewer tasks than its share of a batch, the others fill the batch.
        """
        left = {name: count for name, count in available.items() if count}
        sources = self._state.sources
        picks: list[str] = []
        while left and len(picks) < size:
            for name in left:
                sources[name].credit += self._weights[name]
            pick = max(left, key=lambda name: sources[name].credit)
            sources[pick].credit -= math.fsum(self._weights[name] for name in left)
            picks.append(pick)
            left[pick] -= 1
            if not left[pick]:
                del left[pick]
        return picks

    def _pass(self, name: str, count: int, taken: Set[str]) -> list[str]:
        """Return the next tasks from the passes over a reader's tasks; at least `count` can be drawn from the reader.

        Where a pass ends within a batch, the next pass's tasks that the batch already has are deferred to the next
        batch.
        """
        source, left_out = self._state.sources[name], self._state.left_out
        queue = [task for task in source.deferred if task in self._tasks and task not in left_out]
        drawn = [task for task in queue if task not in taken][:count]
        in_batch = {*drawn, *taken}
        source.deferred = [task for task in queue if task not in drawn]
        while len(drawn) < count:
            order = self._order(name, source.passes)
            if source.position >= len(order):
                source.passes, source.position = source.passes + 1, 0
                continue
            task = order[source.position]
            source.position += 1
            if task in in_batch:
                source.deferred.append(task)
            elif task not in left_out:
                drawn.append(task)
                in_batch.add(task)
        return drawn

    def _order(self, name: str, number: int) -> list[str]:
        if not self.shuffle:
            return self._ids[name]
        cached = self._orders.get(name)
        if cached is None or cached[0] != number:
            order = list(self._ids[name])
            random.Random(f"{self.seed}|{name}|pass|{number}").shuffle(order)
            cached = self._orders[name] = (number, order)
        return cached[1]

    def _by_success(self, name: str, active: Sequence[str], count: int, n_taken: int) -> list[str]:
        """Return tasks drawn without replacement, with weights that are largest where half of the episodes succeed.

        Algorithm A-Res of Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006.
        """
        again = f"|{n_taken}" if n_taken else ""
        rng = random.Random(f"{self.seed}|{name}|curriculum|{self._state.step}{again}")
        keys = {task: math.log(1.0 - rng.random()) / self._learnability(task) for task in active}
        return heapq.nlargest(count, active, key=keys.__getitem__)

    def _learnability(self, task: str) -> float:
        """Return a task's weight: 4p(1 - p) for a success rate p, 1 without results.

        p(1 - p) is the variance of success: Foster et al., "Learning to reason at the frontier of
        learnability", arXiv:2502.12272.
        """
        assert self.curriculum is not None
        rates = self._state.recent.get(task, ())[-self.curriculum.window :]
        rate = math.fsum(rates) / len(rates) if rates else 0.5
        return max(4.0 * rate * (1.0 - rate), self.curriculum.min_weight)

    def _take_results(self, step: int) -> None:
        state, windows = self._state, [used.window for used in (self.difficulty, self.curriculum) if used is not None]
        for recorded in sorted(number for number in state.waiting if number <= step - 1 - self.steps_ahead):
            for task, rate in state.waiting.pop(recorded).items():
                state.recent[task] = [*state.recent.get(task, ()), rate][-max(windows) :]
                self._leave_out(task, recorded)
        if self.difficulty is not None and self.difficulty.retry_after is not None:
            for task, entry in list(state.left_out.items()):
                if step - entry.step > self.difficulty.retry_after:
                    del state.left_out[task]
                    state.recent.pop(task, None)

    def _leave_out(self, task: str, step: int) -> None:
        filter_ = self.difficulty
        if filter_ is None or task in self._state.left_out:
            return
        rates = self._state.recent[task][-filter_.window :]
        if len(rates) < filter_.window:
            return
        rate = math.fsum(rates) / len(rates)
        if rate >= filter_.max:
            self._state.left_out[task] = LeftOutTask(step, "too easy")
        elif rate <= filter_.min:
            self._state.left_out[task] = LeftOutTask(step, "too hard")


@dataclass(frozen=True)
class TaskOrder:
    """Batches of tasks, epoch after epoch. Without a sampler, the last batch of an epoch may be smaller.

    Attributes:
        seed: shuffles each epoch differently; None keeps the order of the data.
        sampler: draws the batches, if they depend on reader weights or on earlier steps' success. An epoch is then as
            many steps as without it.
    """

    tasks: Sequence[Task]
    batch_size: int
    seed: int | None
    sampler: TaskSampler | None = None

    @staticmethod
    def from_config(config: AstunerConfig, tasks: TaskSet, steps_ahead: int = 0) -> TaskOrder:
        """Return the configured order; `steps_ahead` batches may start before the results of a step are known."""
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
