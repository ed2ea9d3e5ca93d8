"""The rows of micro-batches, and the tokens that they compute."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from astuner.backbone.packing.row_bins import (
    RowGroup,
    UpdateTokens,
    divide_groups,
    packed_bins,
    padded_bins,
    padded_budget,
    prefix_bins,
)
from astuner.context_tracker.packing import encode_ids

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=20)


@given(lengths=LENGTHS, budget=st.integers(1, 100))
def test_padded_bins_are_bounded_with_their_padding(lengths: list[int], budget: int) -> None:
    bins = padded_bins(range(len(lengths)), lengths, budget)
    assert sorted(row for each in bins for row in each.rows) == list(range(len(lengths)))
    for each in bins:
        assert each.tokens == len(each.rows) * max(lengths[row] for row in each.rows)
        assert each.tokens <= budget or len(each.rows) == 1


@given(lengths=LENGTHS, budget=st.integers(1, 100))
def test_packed_bins_are_bounded_without_padding(lengths: list[int], budget: int) -> None:
    bins = packed_bins(range(len(lengths)), lengths, budget)
    assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))
    assert all(sum(lengths[row] for row in rows) <= budget or len(rows) == 1 for rows in bins)


def test_rows_with_common_prefixes_are_packed_if_that_is_cheaper() -> None:
    rows = [encode_ids(ids) for ids in ([1, 2, 3], [7, 8], [1, 2, 4], [7, 9])]
    packed, separate = prefix_bins(rows, 4, lambda packing: packing.token_ids[0] == 1)
    assert ([(each.rows, each.tokens) for each in packed], separate) == ([((0, 2), 4)], [[1, 3]])


def test_a_cpu_has_smaller_padded_batches() -> None:
    assert (padded_budget(10_000, torch.device("cpu")), padded_budget(10_000, torch.device("cuda"))) == (4096, 10_000)


def test_distinct_tokens_are_counted_by_mini_batch() -> None:
    tokens = UpdateTokens(computed=15)
    tokens.add_rows([encode_ids(ids) for ids in ([1, 2, 3], [1, 2, 4], [1, 2])])
    tokens.add_rows([encode_ids([1])])
    assert tokens.metrics() == {"update/computed_per_distinct_token": 3.0}


def test_every_process_computes_equally_many_micro_batches():
    groups = [RowGroup([0, 1, 2], shares=True), RowGroup([3, 4, 5, 6])]
    divide_groups(groups, 4)
    assert [group.rows for group in groups] == [[0], [1, 2], [3, 4], [5, 6]]
    assert [group.shares for group in groups] == [True, True, False, False]
    divide_groups(groups, 2)
    assert len(groups) == 4
