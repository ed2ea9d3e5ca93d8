"""Intervals and tests over seeds, checked against tables and scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astuner.analysis.benchmark.statistics import (
    Measurements,
    bootstrap_interval,
    compare_measurements,
    curve_mean,
    holm,
    upper_tail,
)

rates = st.lists(st.floats(0, 1), min_size=2, max_size=8)


@given(rates)
def test_bootstrap_interval_contains_the_mean_and_stays_within_the_values(values: list[float]):
    interval = bootstrap_interval(values)
    assert interval is not None
    low, high = interval
    mean = sum(values) / len(values)
    assert min(values) - 1e-9 <= low <= mean + 1e-9
    assert mean - 1e-9 <= high <= max(values) + 1e-9
    assert interval == bootstrap_interval(values)


def test_bootstrap_interval_of_many_values_is_that_of_the_normal_distribution():
    values = np.random.default_rng(1).normal(5, 2, 400)
    interval = bootstrap_interval(values.tolist())
    half = 1.96 * values.std() / math.sqrt(len(values))
    assert interval == pytest.approx((values.mean() - half, values.mean() + half), abs=0.03)
    assert bootstrap_interval([0.4]) is None


# The 95% and 99.5% quantiles of Student's t in tables of statistics.
@pytest.mark.parametrize(
    ("freedom", "quantile", "tail"),
    [(1, 6.3138, 0.05), (2, 2.9200, 0.05), (4, 2.1318, 0.05), (8, 1.8595, 0.05), (4, 4.6041, 0.005), (30, 2.75, 0.005)],
)
def test_upper_tail_has_the_values_of_tables(freedom: float, quantile: float, tail: float):
    assert upper_tail(quantile, freedom) == pytest.approx(tail, abs=2e-5)
    assert upper_tail(-quantile, freedom) == pytest.approx(1 - tail, abs=2e-5)
    assert upper_tail(0, freedom) == pytest.approx(0.5)
    assert upper_tail(math.inf, freedom) == 0


def test_welch_gives_the_values_of_scipy():
    # scipy.stats.ttest_ind(a, b, equal_var=False) of scipy 1.17: t = -2.8353, 27.7136 degrees of freedom.
    a = [27.5, 21.0, 19.0, 23.6, 17.0, 17.9, 16.9, 20.1, 21.9, 22.6, 23.1, 19.6, 19.0, 21.7, 21.4]
    b = [27.1, 22.0, 20.8, 23.4, 23.4, 23.5, 25.8, 22.0, 24.8, 20.2, 21.9, 22.1, 22.9, 30.0, 23.9]
    difference = compare_measurements(
        Measurements(dict(enumerate(a)), 0.0), Measurements(dict(enumerate(b, start=100)), 0.0)
    )
    assert difference is not None
    assert not difference.paired
    assert 2 * difference.p_better == pytest.approx(0.008452732737443423, rel=1e-6)
    assert difference.p_worse == pytest.approx(1 - difference.p_better)


def test_paired_test_uses_the_differences_of_the_seeds():
    a = Measurements({1: 0.2, 2: 0.5, 3: 0.8}, 0.0)
    b = Measurements({3: 0.7, 1: 0.1, 2: 0.41}, 0.0)
    difference = compare_measurements(a, b)
    assert difference is not None
    assert difference.paired
    # Differences -0.1, -0.09, -0.1: mean -0.0967, standard error 0.0033, t = -29 with 2 degrees of freedom.
    assert difference.difference == pytest.approx(-0.29 / 3)
    assert difference.p_worse == pytest.approx(upper_tail(29, 2), rel=1e-6)
    assert difference.p_worse < 0.001
    # The same seeds with noise of the validation are not significant.
    noisy = compare_measurements(Measurements(a.values, 0.01), Measurements(b.values, 0.01))
    assert noisy is not None
    assert noisy.p_worse > 0.1


def test_equal_values_are_no_difference_and_one_seed_is_not_compared():
    same = Measurements({1: 0.5, 2: 0.5}, 0.0)
    difference = compare_measurements(same, same)
    assert difference is not None
    assert difference.p_worse == difference.p_better == 0.5
    assert compare_measurements(same, Measurements({1: 0.5}, 0.0)) is None


def test_mean_of_a_curve_is_its_area_per_step():
    assert curve_mean([(0, 0.0), (10, 1.0), (40, 1.0)]) == pytest.approx((5 + 30) / 40)
    assert curve_mean([(0, 0.2), (40, 0.9)]) is None


def test_holm_adjusts_in_steps():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
