"""Whole runs with a composed judge: components, unscored episodes, and GDPO's advantages."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from astuner import AstunerJob
from astuner.run_record import read_index, read_metrics, read_recorded_episode
from tests.backbone.local.conftest import AGENTS

WEIGHTS = {"letters": 1.0, "brief": -0.5}
JUDGES = {
    "letters": {"judge_protocol": f"{AGENTS}->CountsLetters"},
    "brief": {
        "judge_protocol": "astuner.task_judge.regex_as_judge->RegexAsJudge",
        "params": {"pattern": r"^[^aeiou]*$"},
        "weight": 0.1,
    },
}


def by_hand(groups: dict[str, list[dict[str, float]]]) -> list[float]:
    """Return GDPO's advantages of the episodes of each group, from their components."""
    sums = []
    for members in groups.values():
        for member in members:
            total = 0.0
            for name, weight in WEIGHTS.items():
                values = [other[name] for other in members]
                spread = statistics.stdev(values)
                total += weight * (member[name] - statistics.mean(values)) / (spread + 1e-6) if spread else 0.0
            sums.append(total)
    return [value / (statistics.stdev(sums) + 1e-6) for value in sums]


def test_components_are_trained_apart_and_unscored_episodes_are_not_trained(
    make_job: Callable[..., AstunerJob], tmp_path: Path
) -> None:
    job = make_job(
        "Answers",
        algorithm="gdpo",
        rollout__num_repeat=6,
        trainer_common__total_training_steps=1,
        trainer_common__algorithm__component_weights=WEIGHTS,
        task_judge__judge_protocol="astuner.task_judge.composed_judges->WeightedJudge",
        task_judge__params={"judges": JUDGES},
    )
    folder = job.tune(tmp_path / "records").record
    (metrics,) = [row.metrics for row in read_metrics(folder) if "reward/mean" in row.metrics]
    assert (metrics["episodes/unscored"], metrics["unscored/busy"], metrics["episodes/ok"]) == (2, 2, 10)
    groups: dict[str, list[dict[str, float]]] = defaultdict(list)
    advantages: dict[str, list[float]] = defaultdict(list)
    for entry in (entry for entry in read_index(folder) if entry.split == "train"):
        if entry.repeat_index == 0:
            assert (entry.reward, entry.advantage, entry.samples, entry.error_kind) == (None, None, 0, "unscored/busy")
            continue
        judgement = read_recorded_episode(folder / entry.path).episode.judgement
        assert judgement is not None
        assert (
            judgement.reward
            == entry.reward
            == pytest.approx(judgement.components["letters"] + 0.1 * judgement.components["brief"])
        )
        groups[entry.task_id].append(dict(judgement.components))
        assert entry.advantage is not None
        advantages[entry.task_id].append(entry.advantage)
    assert [value for group in groups for value in advantages[group]] == pytest.approx(by_hand(groups), abs=1e-3)
    components = [components for members in groups.values() for components in members]
    for name in WEIGHTS:
        assert metrics[f"reward/{name}/mean"] == pytest.approx(statistics.mean(part[name] for part in components))
