"""Statistics over seeds: bootstrap intervals, one-sided t-tests with few seeds, and Holm's correction."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

_RESAMPLES = 10_000
BOOTSTRAP_SEED = 20
"""Seed of the bootstrap's generator. It is fixed, so that equal results have equal intervals."""


def bootstrap_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95% percentile bootstrap interval of the mean; None for fewer than two values.

    B. Efron, "Bootstrap methods: another look at the jackknife", Annals of Statistics 7 (1979); the percentile interval
    is in B. Efron and R. Tibshirani, "An Introduction to the Bootstrap" (1993), chapter 13. The 10,000 resamples are
    drawn with numpy's default generator and the seed `BOOTSTRAP_SEED`. With few values, the interval is somewhat too
    narrow.
    """
    if len(values) < 2:
        return None
    sample = np.asarray(values, dtype=np.float64)
    generator = np.random.default_rng(BOOTSTRAP_SEED)
    means = sample[generator.integers(len(sample), size=(_RESAMPLES, len(sample)))].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def curve_mean(curve: Sequence[tuple[int, float]]) -> float | None:
    """Return the mean height of a validation curve: its area by the trapezoidal rule, divided by its steps.

    The curve has (step, success rate) by ascending step. None if it has only its two ends.
    """
    if len(curve) < 3:
        return None
    steps, rates = np.asarray(curve, dtype=np.float64).T
    return float(np.trapezoid(rates, steps) / (steps[-1] - steps[0]))


@dataclass(frozen=True, slots=True)
class Measurements:
    """A result's values for one measure, by seed, and the variance due to the finite number of validation episodes."""

    values: Mapping[int, float]
    sampling_variance: float


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of a measure between two results, B minus A.

    Attributes:
        difference: B's mean minus A's.
        paired: whether the values were paired by seed.
        p_worse: probability of a mean at least this much lower if A and B are equal.
        p_better: probability of a mean at least this much higher if A and B are equal.
    """

    difference: float
    paired: bool
    p_worse: float
    p_better: float


def compare_measurements(a: Measurements, b: Measurements) -> Difference | None:
    """Test whether the mean over seeds differs; None if one of them has fewer than two seeds.

    If both have equal seeds, this is the paired t-test, otherwise Welch's t-test: B. L. Welch, "The generalization of
    'Student's' problem when several different population variances are involved", Biometrika 34 (1947). C. Colas,
    O. Sigaud and P.-Y. Oudeyer, "A Hitchhiker's Guide to Statistical Comparisons of Reinforcement Learning Algorithms"
    (2019), measured such tests' error rates on returns from few seeds, and recommend Welch's.

    A variance over three seeds is sometimes close to zero by chance. The variance of a difference is therefore at least
    the validation episodes' sampling variance.
    """
    if min(len(a.values), len(b.values)) < 2:
        return None
    paired = a.values.keys() == b.values.keys()
    if paired:
        differences = np.array([b.values[seed] - a.values[seed] for seed in a.values])
        count = len(differences)
        # Equal versions may give equal values for each seed, which is no evidence of a difference.
        mean = float(differences.mean())
        floor = a.sampling_variance + b.sampling_variance
        variance = max(float(differences.var(ddof=1)), floor) / count
        freedom = count - 1.0
    else:
        samples = [np.array([*part.values.values()]) for part in (a, b)]
        mean = float(samples[1].mean() - samples[0].mean())
        shares = [
            max(float(sample.var(ddof=1)), part.sampling_variance) / len(sample)
            for sample, part in zip(samples, (a, b), strict=True)
        ]
        variance = sum(shares)
        weights = sum(share**2 / (len(sample) - 1) for share, sample in zip(shares, samples, strict=True))
        freedom = variance**2 / weights if weights else 1.0
    if variance == 0.0:
        statistic = 0.0 if mean == 0.0 else math.copysign(math.inf, mean)
    else:
        statistic = mean / math.sqrt(variance)
    return Difference(mean, paired, upper_tail(-statistic, freedom), upper_tail(statistic, freedom))


def upper_tail(statistic: float, freedom: float) -> float:
    """Return the probability that Student's t with `freedom` degrees of freedom is at least `statistic`.

    With t = √ν tan θ, the density of θ is proportional to cos^(ν-1) θ on (-π/2, π/2), which is integrated numerically.
    """
    low, high = math.atan(statistic / math.sqrt(freedom)), math.pi / 2

    def integral(start: float) -> float:
        angles = np.linspace(start, high, 20_001)
        return float(np.trapezoid(np.maximum(np.cos(angles), 0.0) ** (freedom - 1.0), angles))

    return integral(low) / integral(-high)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values that are adjusted for the number of tests, in the same order.

    S. Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 6 (1979): the
    probability of one or more false rejections is at most the level at which the adjusted values are judged.
    """
    adjusted = [1.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted
