"""Assignment of rows to data-parallel workers."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from astuner.backbone.verl.batch_layout import assign_rows
from astuner.context_tracker.packing import encode_ids


@st.composite
def mini_batches(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    lengths = draw(st.lists(st.integers(2, 500), min_size=sum(sizes), max_size=sum(sizes)))
    order = draw(st.permutations(range(sum(sizes))))
    parts, start = [], 0
    for size in sizes:
        parts.append(list(order[start : start + size]))
        start += size
    return parts, lengths


@given(mini_batches(), st.integers(1, 5))
def test_every_row_is_assigned_once_and_all_parts_are_equal(batch: tuple[list[list[int]], list[int]], workers: int):
    parts, lengths = batch
    assigned = assign_rows(parts, lengths, workers)
    assert len(assigned) == workers
    assert len({len(rows) for worker in assigned for rows in worker}) == 1
    for number, part in enumerate(parts):
        rows = [row for worker in assigned for row in worker[number] if row is not None]
        assert sorted(rows) == sorted(part)
    padding = sum(row is None for worker in assigned for rows in worker for row in rows)
    largest = max(-(-len(part) // workers) for part in parts)
    assert padding == workers * len(parts) * largest - len(lengths)


@given(mini_batches(), st.integers(1, 5), st.data())
def test_rows_with_common_prefixes_are_assigned_once(
    batch: tuple[list[list[int]], list[int]], workers: int, data: st.DataObject
):
    parts, lengths = batch
    ids = st.lists(st.integers(0, 2), min_size=2, max_size=6)
    encoded = [encode_ids(data.draw(ids)) for _ in lengths]
    assigned = assign_rows(parts, lengths, workers, encoded)
    assert len({len(rows) for worker in assigned for rows in worker}) == 1
    for number, part in enumerate(parts):
        rows = [[row for row in worker[number] if row is not None] for worker in assigned]
        assert sorted(row for each in rows for row in each) == sorted(part)
        # Each worker has a range of the sorted rows.
        in_order = [sorted(encoded[row] for row in each) for each in rows if each]
        assert all(before[-1] <= after[0] for before, after in itertools.pairwise(in_order))


def test_groups_stay_on_one_worker():
    prompts = [[1] * 20, [2] * 20, [3] * 20, [4] * 20]
    encoded = [encode_ids([*prompts[row % 4], row, row]) for row in range(16)]
    assigned = assign_rows([list(range(16))], [22] * 16, 2, encoded)
    assert [sorted(row % 4 for row in worker[0] if row is not None) for worker in assigned] == [
        [0] * 4 + [1] * 4,
        [2] * 4 + [3] * 4,
    ]


def test_workers_have_balanced_numbers_of_tokens():
    assert assign_rows([[0, 1, 2, 3], [4]], [10, 9, 2, 1, 7], 2) == [[[0, 3], [4, None]], [[1, 2], [None, None]]]
