"""Assignment of rows to data-parallel workers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from astuner.backbone.verl.batch_layout import assign_rows


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


def test_workers_have_balanced_numbers_of_tokens():
    assert assign_rows([[0, 1, 2, 3], [4]], [10, 9, 2, 1, 7], 2) == [[[0, 3], [4, None]], [[1, 2], [None, None]]]
