"""The first difference between two run records: configuration, tasks, tokens, rewards, advantages or gradients."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.text import Text

from astuner.errors import short_repr
from astuner.run_record.episode_file import RecordedEpisode, read_recorded_episode
from astuner.run_record.episodes import EpisodeEntry, read_index
from astuner.run_record.metrics import read_metrics
from astuner.run_record.recorded_run import config_difference, find_run
from astuner.run_record.updates import by_token, entropy_by_token
from astuner.schema import Split

DifferenceKind = Literal[
    "task order", "episode", "prompt", "token", "logprob", "reward", "advantage", "trainer logprob", "gradient",
    "metric",
]  # fmt: skip
# They name a run, and nothing depends on them.
_NAMES_OF_RUNS = {"astuner.experiment_name", "astuner.experiment_dir", "astuner.project_name"}
# The second of several mini-batches depends on them, so they come before the trainer's logprobs.
_UPDATE_INPUTS = ("lr", "update/cpu_threads")
# What the other metrics of an update depend on comes first.
_FIRST_METRICS = ("loss/policy", "loss/kl", "loss/total", "loss/sft", "grad_norm")
_MAX_KEYS = 10

_Step = tuple[int, Split]
_Pair = tuple[RecordedEpisode, RecordedEpisode]


@dataclass(frozen=True)
class FirstDifference:
    """The first difference between two runs.

    Attributes:
        kind: what differs; `gradient` is the norm of the gradient.
        step: the training step; 0 is before the first update.
        name: the name of the metric or the episode field, or "".
        first, second: the two runs' values.
        split: `train` or `val`; None for a metric.
        task_id, episode_id: the task and the episode, if the difference is in one.
        call: the LLM call's number in its episode, from 1; for an update's values, the sample's number.
        position: the index of the token in the prompt, in the completion, or in the sample, from 0.
    """

    kind: DifferenceKind
    step: int
    name: str
    first: object
    second: object
    split: Split | None = None
    task_id: str | None = None
    episode_id: str | None = None
    call: int | None = None
    position: int | None = None

    def __str__(self) -> str:
        unit = "sample" if self.kind in ("advantage", "trainer logprob") else "call"
        parts = [f"step {self.step}"]
        parts += [] if self.split in (None, "train") else ["validation"]
        parts += [] if self.task_id is None else [f"task {self.task_id}"]
        parts += [] if self.episode_id is None else [f"episode {self.episode_id}"]
        parts += [] if self.call is None else [f"{unit} {self.call}"]
        parts += [] if self.position is None else [f"position {self.position}"]
        name = f" {self.name}" if self.name and self.name != self.kind else ""
        return f"{', '.join(parts)}: {self.kind}{name}: {short_repr(self.first)} and {short_repr(self.second)}"


@dataclass(frozen=True)
class RunDifference:
    """The comparison of two runs.

    Attributes:
        keys: the configuration keys that differ, in alphabetical order, with the two values.
        first: the first difference in what the runs sampled and computed; None if there is none.
        steps: the number of training steps that both runs recorded.
    """

    keys: tuple[tuple[str, object, object], ...]
    first: FirstDifference | None
    steps: int

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        return not self.keys and self.first is None


@dataclass(frozen=True)
class _Comparison:
    """Compares values; numbers are equal if they differ by `tolerance` at most."""

    tolerance: float = 0.0

    def equal(self, first: object, second: object) -> bool:
        if isinstance(first, int | float) and isinstance(second, int | float):
            both_nan = math.isnan(first) and math.isnan(second)
            return first == second or both_nan or abs(first - second) <= self.tolerance
        return first == second

    def position(self, first: Sequence[object], second: Sequence[object]) -> int | None:
        """Return the index of the first difference between two sequences; None if they are equal."""
        if tuple(first) == tuple(second):
            return None
        for index, (a, b) in enumerate(zip(first, second, strict=False)):
            if not self.equal(a, b):
                return index
        return None if len(first) == len(second) else min(len(first), len(second))


def find_difference(first: Path, second: Path, tolerance: float = 0.0) -> RunDifference:
    """Return the configuration keys in which two runs differ, and the first difference in their records.

    The order is that in which a run computes: for each step its tasks, its episodes' tokens, their rewards and
    advantages, the learning rate, the trainer's logprobs and the other metrics of the update. Times are not compared.

    The largest absolute difference of numbers that counts as none is `tolerance`.

    Raises:
        RecordError: a record cannot be read.
    """
    keys = tuple(
        (row["key"], row["values"][0], row["values"][1])
        for row in config_difference({"first": first, "second": second})
        if row["key"] not in _NAMES_OF_RUNS
    )
    walk = _Walk((first, second), _Comparison(tolerance))
    return RunDifference(keys, next(walk.differences(), None), walk.common_steps)


class _Walk:
    """Goes through two runs' records in the order of their computation."""

    def __init__(self, folders: tuple[Path, Path], compare: _Comparison) -> None:
        self.folders = folders
        self.compare = compare
        # Of each run, the episodes by step and split, and the metrics by step, without times.
        self._entries: list[dict[_Step, list[EpisodeEntry]]] = [{}, {}]
        self._metrics: list[dict[int, dict[str, float | None]]] = [{}, {}]
        for folder, entries, metrics in zip(folders, self._entries, self._metrics, strict=True):
            for entry in read_index(folder):
                entries.setdefault((entry.step, entry.split), []).append(entry)
            for row in read_metrics(folder):
                untimed = {name: value for name, value in row.metrics.items() if not name.startswith("time/")}
                metrics.setdefault(row.step, {}).update(untimed)

    @property
    def common_steps(self) -> int:
        """The number of training steps that both runs recorded."""
        a, b = ({step for step, values in each.items() if step and "lr" in values} for each in self._metrics)
        return len(a & b)

    def differences(self) -> Iterator[FirstDifference]:
        """Yield the differences, the first one first."""
        steps = sorted(
            {step for each in self._entries for step, _ in each} | {s for each in self._metrics for s in each}
        )
        for step in steps:
            yield from self._of_split(step, "train")
            yield from self._of_metrics(step, lambda name: not name.startswith("val/") and name not in _UPDATE_INPUTS)
            yield from self._of_split(step, "val")
            yield from self._of_metrics(step, lambda name: name.startswith("val/"))

    def _of_metrics(self, step: int, selected: Callable[[str], bool]) -> Iterator[FirstDifference]:
        first, second = (each.get(step, {}) for each in self._metrics)
        names = {*first, *second}
        ordered = [*(name for name in _FIRST_METRICS if name in names), *sorted(names - {*_FIRST_METRICS})]
        for name in filter(selected, ordered):
            values = first.get(name, "missing"), second.get(name, "missing")
            if not self.compare.equal(*values):
                yield FirstDifference("gradient" if name == "grad_norm" else "metric", step, name, *values)

    def _of_split(self, step: int, split: Split) -> Iterator[FirstDifference]:
        first, second = (each.get((step, split), []) for each in self._entries)
        tasks = [list(dict.fromkeys(entry.task_id for entry in entries)) for entries in (first, second)]
        ids = [[entry.episode_id for entry in entries] for entries in (first, second)]
        names: list[tuple[DifferenceKind, list[list[str]]]] = [("task order", tasks), ("episode", ids)]
        for kind, (of_first, of_second) in names:
            if (index := self.compare.position(of_first, of_second)) is not None:
                a, b = (each[index] if index < len(each) else "missing" for each in (of_first, of_second))
                yield FirstDifference(kind, step, "", a, b, split, position=index)
                return
        pairs = [
            (read_recorded_episode(self.folders[0] / one.path), read_recorded_episode(self.folders[1] / other.path))
            for one, other in zip(first, second, strict=True)
        ]
        for of_pair in (self._of_tokens, self._of_rewards, self._of_advantages):
            for pair in pairs:
                yield from of_pair(pair, step)
        if split == "train":
            yield from self._of_metrics(step, lambda name: name in _UPDATE_INPUTS)
        for pair in pairs:
            for number, columns in enumerate(_update_columns(pair), 1):
                for values in columns[1:]:
                    yield from self._of_sequence(pair, step, "trainer logprob", number, *values)

    def _of_tokens(self, pair: _Pair, step: int) -> Iterator[FirstDifference]:
        calls = [recorded.episode.calls for recorded in pair]
        for number, (a, b) in enumerate(zip(*calls, strict=False), 1):
            fields: list[tuple[DifferenceKind, Sequence[object], Sequence[object]]] = [
                ("prompt", a.prompt_ids, b.prompt_ids),
                ("token", a.completion_ids, b.completion_ids),
                ("logprob", a.logprobs, b.logprobs),
            ]
            for kind, first, second in fields:
                yield from self._of_sequence(pair, step, kind, number, first, second)
            for name in ("sampling", "policy_version", "agent_name", "trained"):
                values = getattr(a, name), getattr(b, name)
                if not self.compare.equal(*values):
                    yield _in(pair, step, "episode", name, *values, call=number)
        if len(calls[0]) != len(calls[1]):
            yield _in(pair, step, "episode", "number of calls", len(calls[0]), len(calls[1]))
        states = [(recorded.episode.status, recorded.episode.error_kind) for recorded in pair]
        if states[0] != states[1]:
            yield _in(pair, step, "episode", "status", *states)

    def _of_rewards(self, pair: _Pair, step: int) -> Iterator[FirstDifference]:
        a, b = (recorded.episode for recorded in pair)
        for number, (first, second) in enumerate(zip(a.calls, b.calls, strict=False), 1):
            if not self.compare.equal(first.reward, second.reward):
                yield _in(pair, step, "reward", "", first.reward, second.reward, call=number)
        for agent in sorted({*a.agent_rewards, *b.agent_rewards}):
            values = a.agent_rewards.get(agent), b.agent_rewards.get(agent)
            if not self.compare.equal(*values):
                yield _in(pair, step, "reward", f"of agent {agent}", *values)
        if not self.compare.equal(a.reward, b.reward):
            yield _in(pair, step, "reward", "", a.reward, b.reward)

    def _of_advantages(self, pair: _Pair, step: int) -> Iterator[FirstDifference]:
        a, b = (recorded.labels.advantage for recorded in pair)
        if not self.compare.equal(a, b):
            yield _in(pair, step, "advantage", "", a, b)
        for number, columns in enumerate(_update_columns(pair), 1):
            yield from self._of_sequence(pair, step, "advantage", number, *columns[0])

    def _of_sequence(
        self, pair: _Pair, step: int, kind: DifferenceKind, number: int, a: Sequence[object], b: Sequence[object]
    ) -> Iterator[FirstDifference]:
        index = self.compare.position(a, b)
        if index is not None:
            values = [each[index] if index < len(each) else "end" for each in (a, b)]
            yield _in(pair, step, kind, "", *values, call=number, position=index)


def _in(
    pair: _Pair,
    step: int,
    kind: DifferenceKind,
    name: str,
    first: object,
    second: object,
    *,
    call: int | None = None,
    position: int | None = None,
) -> FirstDifference:
    episode, labels = pair[0].episode, pair[0].labels
    return FirstDifference(
        kind, step, name, first, second, labels.split, episode.task.task_id, episode.episode_id, call, position
    )


_Columns = tuple[tuple[Sequence[object], Sequence[object]], ...]


def _update_columns(pair: _Pair) -> Iterator[_Columns]:
    """Yield, for each sample, its tokens' advantages, trainer logprobs and entropies in both runs."""
    samples = [zip(recorded.episode.samples, recorded.updates, strict=False) for recorded in pair]
    for (sample, update), (other, other_update) in zip(*samples, strict=False):
        first, second = by_token(sample, update), by_token(other, other_update)
        entropies = entropy_by_token(sample, update), entropy_by_token(other, other_update)
        yield (first[0], second[0]), (first[1], second[1]), entropies


def bisect(first: str, second: str, exp_dir: Path, console: Console, *, tolerance: float, as_json: bool) -> bool:
    """Print the first difference between two runs, and return whether they are equal.

    The runs are folders, or names under `exp_dir`. For `tolerance`, see `find_difference`.

    Raises:
        RecordError: there is no such run, or its record cannot be read.
    """
    result = find_difference(find_run(first, exp_dir), find_run(second, exp_dir), tolerance)
    if as_json:
        text = json.dumps({**asdict(result), "equal": result.is_equal}, indent=2, default=str)
        console.print(text, markup=False, soft_wrap=True)
        return result.is_equal
    for key, a, b in result.keys[:_MAX_KEYS]:
        console.print(Text(f"configuration: {key}: {short_repr(a)} and {short_repr(b)}"), soft_wrap=True)
    if len(result.keys) > _MAX_KEYS:
        console.print(f"configuration: {len(result.keys) - _MAX_KEYS} more keys differ; --json lists them")
    steps = f"{result.steps} step{'' if result.steps == 1 else 's'}"
    if result.first is not None:
        console.print(Text(str(result.first)), soft_wrap=True)
    else:
        console.print(f"the runs are equal in the {steps} that both have")
    return result.is_equal
