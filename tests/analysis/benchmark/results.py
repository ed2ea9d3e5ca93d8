"""Results of simulated runs, whose true success rates are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from astuner.analysis.benchmark.results import BenchResult, SeedResult, bench_result
from astuner.analysis.benchmark.suite import SuiteEntry
from astuner.run_record.summary import TokensSummary

STEPS = (0, 10, 20, 30, 40)


def learning_curve(rate: float, final: float = 0.9, before: float = 0.3) -> list[float]:
    """Return success at `STEPS` of a run that learns with this rate per step."""
    return [before + (final - before) * (1 - float(np.exp(-rate * step))) for step in STEPS]


def simulated_result(
    generator: np.random.Generator,
    curve: Sequence[float],
    seeds: Sequence[int] = (1, 2, 3, 4, 5),
    *,
    name: str = "task",
    backbone: str = "local",
    spread: float = 0.03,
    episodes: int = 200,
) -> BenchResult:
    """Return the result of runs whose true curve is `curve` plus a normal offset per seed, measured on episodes."""
    runs = []
    for seed in seeds:
        offset = generator.normal(0, spread)
        rates = np.clip(np.array(curve) + np.array([0.0, *[offset] * (len(curve) - 1)]), 0, 1)
        measured = [float(count) / episodes for count in generator.binomial(episodes, rates)]
        runs.append(seed_result(seed, measured, episodes))
    entry = SuiteEntry(name=name, conf="task.yaml", overrides=("astuner.trainer_common.test_freq=10",))
    return bench_result(entry, backbone, "a/model", {"astuner": "0.1.0", "cpus": "2"}, runs)


def seed_result(seed: int, rates: Sequence[float], episodes: int = 200) -> SeedResult:
    steps = STEPS if len(rates) == len(STEPS) else range(len(rates))
    return SeedResult(
        seed=seed,
        before=rates[0],
        after=rates[-1],
        seconds=100.0,
        steps=steps[-1],
        episodes=episodes,
        tokens=TokensSummary(raw=1000, distinct=600, trained=100),
        curve=tuple(zip(steps, rates, strict=True)),
    )


def fixed_result(rates: Callable[[int], Sequence[float]], seeds: Sequence[int], **names: str) -> BenchResult:
    """Return a result whose seeds have the success rates `rates(seed)` at the validations."""
    entry = SuiteEntry(name=names.get("name", "task"), conf="task.yaml")
    runs = [seed_result(seed, rates(seed)) for seed in seeds]
    return bench_result(entry, names.get("backbone", "local"), "a/model", {}, runs)
