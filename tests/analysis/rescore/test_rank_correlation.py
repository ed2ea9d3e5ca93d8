"""Kendall's tau and ranks, compared with their definitions."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astuner.analysis.rescore.comparison import kendall_tau, ranks

PAIRS = st.lists(st.tuples(st.integers(-4, 4), st.integers(-4, 4)), min_size=2, max_size=60)


def sign(number: float) -> int:
    return (number > 0) - (number < 0)


def tau_by_definition(left: list[float], right: list[float]) -> float | None:
    pairs = [
        (sign(left[i] - left[j]), sign(right[i] - right[j])) for i, j in itertools.combinations(range(len(left)), 2)
    ]
    untied = [sum(pair[side] != 0 for pair in pairs) for side in (0, 1)]
    return None if 0 in untied else sum(a * b for a, b in pairs) / math.sqrt(untied[0] * untied[1])


@given(PAIRS)
def test_kendall_tau_equals_its_definition(pairs: list[tuple[int, int]]):
    left, right = [float(a) for a, _ in pairs], [float(b) for _, b in pairs]
    expected = tau_by_definition(left, right)
    found = kendall_tau(left, right)
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert math.isclose(found, expected, abs_tol=1e-12)
        assert kendall_tau(right, left) == pytest.approx(found)


def test_kendall_tau_of_known_sequences():
    # Kendall, "Rank Correlation Methods": 1 - 2 × 3 inversions / 10 pairs
    assert kendall_tau([1, 2, 3, 4, 5], [3, 1, 2, 5, 4]) == pytest.approx(0.4)
    assert kendall_tau(range(5000), [-x for x in range(5000)]) == -1.0
    assert kendall_tau([1, 1, 1], [1, 2, 3]) is None
    assert kendall_tau([1], [1]) is None
    assert kendall_tau([], []) is None


def test_ranks_are_shares_of_the_values_below():
    assert ranks([3.0, 1.0, 2.0]) == [1.0, 0.0, 0.5]
    assert ranks([1.0, 1.0, 5.0]) == [0.25, 0.25, 1.0]
    assert ranks([7.0]) == [0.0]
