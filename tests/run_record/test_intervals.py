"""Intervals of success rates, against published values and by their coverage."""

from __future__ import annotations

import math
from itertools import product

import pytest

from astuner.run_record.metrics import difference_interval, success_interval


def test_the_interval_of_a_rate_is_wilsons() -> None:
    # Newcombe 1998, Statistics in Medicine 17: 857-872, table I, method 3.
    for successes, episodes, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611)):
        assert success_interval(successes / episodes, episodes) == pytest.approx((low, high), abs=5e-5)


def test_the_interval_of_a_difference_is_newcombes() -> None:
    # Newcombe 1998, Statistics in Medicine 17: 873-890, table II, method 10: 56/70 - 48/80 and 9/10 - 3/10.
    assert difference_interval(48 / 80, 80, 56 / 70, 70) == pytest.approx((0.0524, 0.3339), abs=5e-5)
    assert difference_interval(3 / 10, 10, 9 / 10, 10) == pytest.approx((0.1705, 0.8090), abs=5e-5)


def test_the_interval_of_a_difference_covers_it_in_about_95_percent() -> None:
    before, after, episodes = 0.3, 0.45, 40

    def probability(rate: float, successes: int) -> float:
        return math.comb(episodes, successes) * rate**successes * (1 - rate) ** (episodes - successes)

    covered = 0.0
    for first, last in product(range(episodes + 1), repeat=2):
        low, high = difference_interval(first / episodes, episodes, last / episodes, episodes)
        if low <= after - before <= high:
            covered += probability(before, first) * probability(after, last)
    assert 0.94 < covered < 0.97
