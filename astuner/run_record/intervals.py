"""Confidence intervals of measured rates."""

from __future__ import annotations

import math

_Z95 = 1.959964  # the 97.5% quantile of the normal distribution


def success_interval(rate: float, episodes: int) -> tuple[float, float]:
    """Return the 95% interval of a success rate: Wilson's score interval.

    E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927). Unlike the
    normal approximation, it stays within 0 and 1 and has a width at rates of 0 and 1.

    Args:
        rate: share of the episodes that succeeded, 0 to 1.
        episodes: number of episodes, at least 1, taken as independent.
    """
    square = _Z95**2 / episodes
    centre = (rate + square / 2) / (1 + square)
    half = _Z95 / (1 + square) * math.sqrt(rate * (1 - rate) / episodes + square / (4 * episodes))
    return max(centre - half, 0.0), min(centre + half, 1.0)


def difference_interval(before: float, n_before: int, after: float, n_after: int) -> tuple[float, float]:
    """Return the 95% interval for the difference between two success rates, after minus before.

    Newcombe's hybrid score interval from the intervals of both rates: R. G. Newcombe, "Interval estimation for the
    difference between independent proportions", Statistics in Medicine 17 (1998), method 10.

    Args:
        before, after: the rates, 0 to 1.
        n_before, n_after: their numbers of episodes, at least 1 each, taken as independent.
    """
    low_before, high_before = success_interval(before, n_before)
    low_after, high_after = success_interval(after, n_after)
    difference = after - before
    return (
        difference - math.hypot(after - low_after, high_before - before),
        difference + math.hypot(high_after - after, before - low_before),
    )


def mean_interval(mean: float, variance: float, episodes: int) -> tuple[float, float]:
    """Return the 95% interval of a mean in the normal approximation.

    Args:
        mean: mean of the values.
        variance: their unbiased variance.
        episodes: number of values, at least 1, taken as independent.
    """
    half = _Z95 * math.sqrt(variance / episodes)
    return mean - half, mean + half
