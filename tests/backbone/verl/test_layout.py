"""Rows in equal shares."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from astuner.backbone.verl.layout import arrange


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    lengths = draw(st.lists(st.integers(2, 500), min_size=sum(sizes), max_size=sum(sizes)))
    order = draw(st.permutations(range(sum(sizes))))
    parts, taken = [], 0
    for size in sizes:
        parts.append(list(order[taken : taken + size]))
        taken += size
    return parts, lengths


@given(batches(), st.integers(1, 5))
def test_every_row_has_one_place_and_all_shares_are_equal(given: tuple[list[list[int]], list[int]], workers: int):
    parts, lengths = given
    shares = arrange(parts, lengths, workers)
    assert len(shares) == workers
    assert len({len(rows) for share in shares for rows in share}) == 1
    for number, part in enumerate(parts):
        placed = [row for share in shares for row in share[number] if row is not None]
        assert sorted(placed) == sorted(part)
    fills = sum(row is None for share in shares for rows in share for row in rows)
    largest = max(-(-len(part) // workers) for part in parts)
    assert fills == workers * len(parts) * largest - len(lengths)


def test_workers_compute_as_much_as_one_another():
    assert arrange([[0, 1, 2, 3], [4]], [10, 9, 2, 1, 7], 2) == [[[0, 3], [4, None]], [[1, 2], [None, None]]]
