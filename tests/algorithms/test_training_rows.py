"""The division of a step into mini-batches."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astuner.algorithms.training_rows import TrainingRow, mini_batches, row_scales
from astuner.config.algorithms import MiniBatchUnit


def divide(
    group_sizes: list[int], count: int, seed: str = "s", unit: MiniBatchUnit = "episode"
) -> tuple[list[str], list[list[int]]]:
    """The group of each episode, and the episodes of each mini-batch; an episode has one or two rows."""
    groups = [f"g{group}" for group, size in enumerate(group_sizes) for _ in range(size)]
    rows = [TrainingRow((1, 2), (0, 1), episode=e) for e in range(len(groups)) for _ in range(1 + e % 2)]
    batches = mini_batches(rows, groups, count, seed, unit)
    assert sorted(index for batch in batches for index in batch) == list(range(len(rows)))
    assert all(batch == sorted(batch) for batch in batches)
    episodes = [sorted({rows[index].episode for index in batch}) for batch in batches]
    assert sum(map(len, episodes)) == len(groups)
    return groups, episodes


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.integers(1, 6), st.text(max_size=3))
def test_mini_batches_are_equal_and_divide_few_groups(group_sizes: list[int], count: int, seed: str):
    groups, batches = divide(group_sizes, count, seed)
    assert len(batches) == min(count, len(groups))
    sizes = [len(batch) for batch in batches]
    assert max(sizes) - min(sizes) <= 1
    parts = Counter(group for batch in batches for group in {groups[episode] for episode in batch})
    assert sum(parts.values()) - len(parts) <= len(batches) - 1


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.integers(1, 6), st.text(max_size=3))
def test_mini_batches_of_groups_divide_none(group_sizes: list[int], count: int, seed: str):
    groups, batches = divide(group_sizes, count, seed, "group")
    contents = [{groups[episode] for episode in batch} for batch in batches]
    assert len(contents) == min(count, len(group_sizes))
    assert max(map(len, contents)) - min(map(len, contents)) <= 1
    assert sum(map(len, contents)) == len(group_sizes), "a group is in two mini-batches"


def test_mini_batches_of_unequal_groups_have_equal_weight():
    _, batches = divide([1, 5, 2], 3, unit="group")
    assert sorted(map(len, batches)) == [1, 2, 5]
    for batch in batches:
        rows = [TrainingRow((1, 2, 3), (0, 1, 1), episode=episode) for episode in batch]
        assert float((row_scales(rows, "seq-mean-token-mean", 9) * 2).sum()) == pytest.approx(1.0)
    # With episodes as the unit, groups are divided for mini-batches of nearly equal size.
    assert sorted(map(len, divide([1, 5, 2], 3)[1])) == [2, 3, 3]


def test_groups_stay_together_if_they_can():
    seen = set()
    for seed in range(20):
        groups, batches = divide([4] * 6, 3, str(seed))
        contents = [sorted({groups[episode] for episode in batch}) for batch in batches]
        assert [len(content) for content in contents] == [2, 2, 2]
        seen.add(str(contents))
    assert len(seen) > 10


def test_order_depends_on_the_seed_only():
    assert divide([2, 3, 1], 2, "a") == divide([2, 3, 1], 2, "a")
