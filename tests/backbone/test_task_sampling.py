"""Which tasks a step takes from a mixture, with a difficulty filter, and with a curriculum."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astuner.backbone.training.run_state import RunState
from astuner.backbone.training.schedule import SamplingState, TaskOrder, TaskSampler
from astuner.config.root import AstunerConfig
from astuner.config.task_selection import CurriculumConfig, DifficultyFilter
from astuner.errors import RecordError
from astuner.schema import Task, TaskSet

Rates = Callable[[int, str], float]
DIFFICULTY = DifficultyFilter(type="difficulty")
CURRICULUM = CurriculumConfig(enable=True)


def tasks_of(sizes: Mapping[str, int]) -> list[Task]:
    return [Task(f"{name}/{number}", "?", source=name) for name, size in sizes.items() for number in range(size)]


def sampler_of(
    sizes: Mapping[str, int], weights: Mapping[str, float] | None = None, batch_size: int = 8, **settings: Any
) -> TaskSampler:
    values = {"seed": 1, "shuffle": True} | settings
    return TaskSampler(tasks_of(sizes), weights=weights or {}, batch_size=batch_size, **values)


def draw(sampler: TaskSampler, step: int) -> list[str]:
    return [task.task_id for task in sampler.batch(step)]


def play(sampler: TaskSampler, steps: range, rates: Rates) -> list[list[str]]:
    """Draw the batch of each step, and record its results."""
    batches = []
    for step in steps:
        assert sampler.is_ready(step)
        batches.append(draw(sampler, step))
        sampler.record(step, {task: rates(step, task) for task in batches[-1]})
    return batches


def random_rates(step: int, task: str) -> float:
    return random.Random(f"{step}{task}").choice([0.0, 0.25, 0.5, 1.0])


def through_checkpoint(state: SamplingState) -> SamplingState:
    """Return the state as a checkpoint in JSON returns it."""
    restored = RunState.load(json.loads(json.dumps(RunState(task_sampling=state).dump(0.0)))).task_sampling
    assert restored is not None
    return restored


def test_readers_share_the_draws_by_weight() -> None:
    sampler = sampler_of({"a": 50, "b": 50, "c": 50}, {"a": 5, "b": 2.5, "c": 0.5}, batch_size=10)
    counts = Counter(name for step in range(1, 17) for name in (task[0] for task in draw(sampler, step)))
    assert counts == {"a": 100, "b": 50, "c": 10}
    for step in range(17, 30):
        shares = Counter(task[0] for task in draw(sampler, step))
        assert (5 <= shares["a"] <= 7, 2 <= shares["b"] <= 4, shares["c"] <= 1) == (True, True, True)


def test_a_reader_with_too_few_tasks_leaves_its_share_to_the_others() -> None:
    sampler = sampler_of({"a": 2, "b": 40}, {"a": 9, "b": 1}, batch_size=10)
    for step in range(1, 20):
        batch = draw(sampler, step)
        assert (len(batch), len(set(batch)), {"a/0", "a/1"} <= set(batch)) == (10, 10, True)


@given(
    st.dictionaries(st.sampled_from("abcd"), st.tuples(st.integers(1, 9), st.floats(0.1, 10)), min_size=1),
    st.integers(1, 12),
    st.booleans(),
)
def test_batches_have_no_duplicates_and_passes_take_every_task(
    readers: dict[str, tuple[int, float]], batch_size: int, shuffle: bool
) -> None:
    sizes = {name: size for name, (size, _) in readers.items()}
    weights = {name: weight for name, (_, weight) in readers.items()}
    sampler = sampler_of(sizes, weights, batch_size, shuffle=shuffle)
    drawn: Counter[str] = Counter()
    for step in range(1, 25):
        batch = draw(sampler, step)
        assert len(batch) == len(set(batch)) == min(batch_size, sum(sizes.values()))
        drawn.update(batch)
        for name, size in sizes.items():
            counts = [drawn[f"{name}/{number}"] for number in range(size)]
            assert max(counts) - min(counts) <= 2, "a task was drawn a pass more than another"


def test_the_order_of_a_pass_depends_on_the_seed_and_the_pass() -> None:
    sizes, weights = {"a": 30, "b": 30}, {"a": 1.0, "b": 1.0}
    first, again, other = (sampler_of(sizes, weights, 60, seed=seed) for seed in (1, 1, 2))
    assert draw(first, 1) == draw(again, 1) != draw(other, 1)
    assert draw(first, 2) != draw(first, 1)
    assert draw(sampler_of(sizes, weights, 4, shuffle=False), 2) == ["a/2", "b/2", "a/3", "b/3"]


def test_tasks_that_are_always_or_never_solved_are_left_out() -> None:
    sampler = sampler_of({"": 8}, batch_size=4, difficulty=DIFFICULTY)
    rates = {"/0": 1.0, "/1": 0.0, "/2": 1.0}
    batches = play(sampler, range(1, 21), lambda step, task: rates.get(task, 0.5) if step > 2 or task != "/2" else 0.0)
    counts = Counter(task for batch in batches for task in batch)
    assert (counts["/0"], counts["/1"], counts["/2"]) == (2, 2, 3)
    assert min(counts[f"/{number}"] for number in range(3, 8)) >= 13
    assert all(len(set(batch)) == 4 for batch in batches)
    assert sampler.metrics() == {"tasks/too_easy": 2, "tasks/too_hard": 1}
    assert {task: entry.cause for task, entry in sampler.state().left_out.items()} == {
        "/0": "too easy", "/1": "too hard", "/2": "too easy",
    }  # fmt: skip


def test_bounds_of_the_difficulty_filter() -> None:
    filter_ = DifficultyFilter(type="difficulty", window=1, min=0.25, max=0.75)
    sampler = sampler_of({"": 5}, batch_size=5, difficulty=filter_)
    rates = [0.25, 0.26, 0.5, 0.74, 0.75]
    (first, second) = play(sampler, range(1, 3), lambda _, task: rates[int(task[1:])])
    assert sorted(first) == ["/0", "/1", "/2", "/3", "/4"]
    assert sorted(second) == ["/1", "/2", "/3"], "a batch is smaller if fewer tasks are left"


def test_a_task_is_tried_again_after_some_steps() -> None:
    filter_ = DifficultyFilter(type="difficulty", window=1, retry_after=3)
    sampler = sampler_of({"": 2}, batch_size=2, difficulty=filter_)
    batches = play(sampler, range(1, 11), lambda _, task: 0.0 if task == "/0" else 0.5)
    assert [("/0" in batch) for batch in batches] == [True, *[False] * 3, True, *[False] * 3, True, False]


def test_all_tasks_come_back_if_none_is_left() -> None:
    sampler = sampler_of({"": 4}, batch_size=4, difficulty=DIFFICULTY)
    batches = play(sampler, range(1, 8), lambda *_: 1.0)
    assert [len(batch) for batch in batches] == [4] * 7
    assert sampler.metrics()["tasks/too_easy"] == 0


def test_a_curriculum_prefers_tasks_that_are_solved_half_of_the_time() -> None:
    sampler = sampler_of({"": 40}, batch_size=4, curriculum=CURRICULUM)
    levels = [0.0, 0.5, 0.9, 1.0]
    batches = play(sampler, range(1, 401), lambda _, task: levels[int(task[1:]) % 4])
    late = Counter(levels[int(task[1:]) % 4] for batch in batches[100:] for task in batch)
    assert late[0.5] > 2 * late[0.9] > 4 * max(late[0.0], late[1.0]) > 0
    # Every task is tried before its success is known.
    assert len({task for batch in batches[:100] for task in batch}) == 40


def test_a_curriculum_follows_what_is_learned() -> None:
    sampler = sampler_of({"": 20}, batch_size=2, curriculum=CURRICULUM)
    rates: Rates = lambda step, task: 0.5 if (int(task[1:]) < 10) == (step <= 200) else 1.0  # noqa: E731
    batches = play(sampler, range(1, 601), rates)
    early = Counter(int(task[1:]) < 10 for batch in batches[50:200] for task in batch)
    late = Counter(int(task[1:]) < 10 for batch in batches[400:] for task in batch)
    assert early[True] > 3 * early[False]
    assert late[False] > 3 * late[True]


VARIANTS: dict[str, dict[str, Any]] = {
    "mixture": {},
    "difficulty": {"difficulty": DifficultyFilter(type="difficulty", retry_after=4)},
    "curriculum": {"curriculum": CURRICULUM},
    "both": {"difficulty": DIFFICULTY, "curriculum": CurriculumConfig(enable=True, window=5)},
    "ahead": {"difficulty": DIFFICULTY, "curriculum": CURRICULUM, "steps_ahead": 2},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_resumed_run_takes_the_same_tasks(variant: str) -> None:
    make = lambda: sampler_of({"a": 5, "b": 9}, {"a": 1, "b": 3}, 6, **VARIANTS[variant])  # noqa: E731
    whole = play(make(), range(1, 25), random_rates)
    assert whole == play(make(), range(1, 25), random_rates)
    for step in (1, 2, 7, 20):
        before, after = make(), make()
        play(before, range(1, step + 1), random_rates)
        state = through_checkpoint(before.state())
        draw(before, step + 1)  # the state of a checkpoint is a copy
        after.restore(state)
        assert play(after, range(step + 1, 25), random_rates) == whole[step:]


def test_batches_that_are_drawn_ahead_are_the_same() -> None:
    """With a lag of two steps, a batch may be drawn up to two steps before the results of the last ones are known."""
    on_time, ahead = (sampler_of({"": 30}, batch_size=4, curriculum=CURRICULUM, steps_ahead=2) for _ in range(2))
    expected = play(on_time, range(1, 13), random_rates)
    drawn: dict[int, list[str]] = {}
    for step in range(1, 13):
        while len(drawn) < 12 and ahead.is_ready(len(drawn) + 1):
            drawn[len(drawn) + 1] = draw(ahead, len(drawn) + 1)
        assert len(drawn) == min(step + 2, 12)
        assert draw(ahead, step) == drawn[step], "a batch that was drawn is drawn again the same"
        ahead.record(step, {task: random_rates(step, task) for task in drawn[step]})
    assert list(drawn.values()) == expected


def test_a_step_without_results_is_known_too() -> None:
    sampler = sampler_of({"": 4}, batch_size=2, curriculum=CURRICULUM)
    draw(sampler, 1)
    assert not sampler.is_ready(2)
    sampler.record(1, {})
    assert sampler.is_ready(2)
    assert len(draw(sampler, 2)) == 2


def test_the_state_forgets_tasks_that_are_gone() -> None:
    sampler = sampler_of({"a": 3, "b": 3}, {"a": 1, "b": 1}, 4, difficulty=DIFFICULTY)
    play(sampler, range(1, 6), random_rates)
    smaller = sampler_of({"a": 2}, {"a": 1}, 4, difficulty=DIFFICULTY)
    smaller.restore(sampler.state())
    for step in range(6, 12):
        assert set(draw(smaller, step)) <= {"a/0", "a/1"}


@pytest.mark.parametrize("damaged", [{"step": -1}, {"recent": {"a": [2.0]}}, {"sources": {"": {"credit": "x"}}}, []])
def test_a_damaged_state_is_an_error(damaged: object) -> None:
    values = RunState(task_sampling=SamplingState()).dump(0.0) | {"task_sampling": damaged}
    with pytest.raises(RecordError, match=r"the progress in the checkpoint is damaged \(task_sampling"):
        RunState.load(values)


def test_a_run_without_mixture_filter_and_curriculum_needs_no_sampler() -> None:
    config = AstunerConfig.model_validate({"data": {"train_batch_size": 2}})
    tasks = TaskSet(tuple(tasks_of({"": 5})), ())
    order = TaskOrder.from_config(config, tasks)
    assert order.sampler is None
    difficult = AstunerConfig.model_validate({"task_reader": {"filters": [{"type": "difficulty"}]}})
    assert TaskOrder.from_config(difficult, tasks).sampler is not None
    weighted = TaskSet(tasks.training, (), weights={"": 1.0})
    assert TaskOrder.from_config(config, weighted).sampler is not None
    assert TaskOrder.from_config(config, weighted).total_steps(2, None) == order.total_steps(2, None)


@given(st.lists(st.lists(st.integers(1, 6), max_size=3), min_size=1, max_size=12), st.booleans(), st.booleans())
def test_further_tasks_continue_the_passes(refills: list[list[int]], shuffle: bool, by_success: bool) -> None:
    settings = {"shuffle": shuffle, "curriculum": CURRICULUM if by_success else None}
    sampler = sampler_of({"": 7}, batch_size=3, **settings)
    drawn: Counter[str] = Counter()
    for step, counts in enumerate(refills, start=1):
        resumed = sampler_of({"": 7}, batch_size=3, **settings)
        resumed.restore(through_checkpoint(sampler.state()))
        taken = sampler.batch(step)
        assert resumed.batch(step) == taken
        for count in counts:
            further = sampler.further_tasks(count, taken)
            assert resumed.further_tasks(count, taken) == further
            assert len(further) == min(count, 7 - len(taken))
            taken = taken + further
        assert len({task.task_id for task in taken}) == len(taken)
        drawn.update(task.task_id for task in taken)
        sampler.record(step, dict.fromkeys(drawn, 0.5))
        assert by_success or max(drawn.values()) - min(drawn[f"/{number}"] for number in range(7)) <= 2
