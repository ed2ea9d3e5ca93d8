"""The end of a run: the verdict follows the intervals, and a run that did not learn names possible reasons."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from astuner.launcher.run_result import choose_task
from astuner.run_record.episodes import EpisodeEntry
from astuner.run_record.metrics import MetricsRow
from astuner.run_record.summary import EpisodesSummary, RunSummary, ValidationsSummary, ValidationSummary
from astuner.run_record.verdict import run_verdict
from tests.launcher.conftest import Command

STEP = {"episodes/total": 8.0, "update/groups_without_variance": 0.0, "kl/update": 0.01}


def described(before: float | None, after: float, episodes: int = 100, **changes: float) -> str:
    first = None if before is None else ValidationSummary(success_rate=before, reward=before, episodes=episodes)
    last = ValidationSummary(success_rate=after, reward=after, episodes=episodes)
    summary = RunSummary(
        backbone="local", seed=1, steps=24, seconds=1.0, validation=ValidationsSummary(before=first, after=last)
    )
    rows = [MetricsRow(step, 0.0, STEP | {"reward/mean": step / 24} | changes) for step in range(1, 25)]
    verdict = run_verdict(summary, rows)
    return "\n".join((*verdict.lines, *(f"  - {text}" for text in verdict.suggestions)))


@pytest.mark.parametrize(
    ("before", "after", "episodes", "verdict"),
    [
        (0.12, 0.48, 100, "it learned: success 12.0% ± 8 on 100 episodes → 48.0% ± 10 on 100 episodes (+36 points, "),
        (0.48, 0.12, 100, "it got worse: "),
        (0.40, 0.48, 100, "no clear change: "),
        (0.0, 0.0, 100, "no clear change: success 0.0% ± 4 on 100 episodes → 0.0% ± 4"),
        (0.0, 1.0, 1, "no clear change: "),
        (0.40, 0.48, 1000, "it learned: "),
        (None, 0.48, 100, "cannot tell whether it learned: the starting model was not measured (val_before_train: "),
    ],
)
def test_the_verdict_follows_the_interval(before: float | None, after: float, episodes: int, verdict: str) -> None:
    assert described(before, after, episodes).startswith(verdict)


def test_training_rewards_kl_and_steps_without_signal_are_named() -> None:
    text = described(0.1, 0.5, **{"loss/kl": 0.13})
    assert "training reward 0.15 → 0.90 (means of the first and last 6 steps)" in text
    assert "KL to the starting model: 0.13 nats per token" in text
    assert "nothing to learn" not in text
    assert "  - " not in text
    idle = described(0.1, 0.5, **{"update/groups_without_variance": 1.0})
    assert "24 of 24 steps had nothing to learn from" in idle


def test_a_run_that_did_not_learn_names_possible_reasons() -> None:
    assert "use harder tasks" in described(1.0, 1.0)
    assert "the updates hardly changed the model" in described(0.1, 0.1, **{"kl/update": 1e-9})
    assert "more rollout.num_repeat" in described(0.1, 0.1, **{"update/groups_without_variance": 1.0})
    assert "a validation has 4 episodes" in described(0.1, 0.1, 4)


def outcome_of(*rows: dict[str, float], steps: int = 2, **episodes: int) -> tuple[str, str]:
    """The outcome and the first line of a run without a validation of success."""
    summary = RunSummary(backbone="local", seed=1, steps=steps, seconds=1.0, episodes=EpisodesSummary(**episodes))
    verdict = run_verdict(summary, [MetricsRow(step, 0.0, row) for step, row in enumerate(rows)])
    return verdict.outcome, (*verdict.lines, "")[0]


def test_a_run_with_nothing_to_learn_from_says_why() -> None:
    idle = STEP | {"update/groups_without_variance": 1.0}
    assert outcome_of(idle | {"reward/min": 0.0, "reward/max": 0.0}) == (
        "nothing",
        "nothing to learn from: every reward was 0",
    )
    assert outcome_of(idle | {"reward/min": 0.0, "reward/max": 1.0})[1].endswith("equal rewards, in every step")
    lost = ("nothing", "nothing to learn from: 70 of 120 episodes failed")
    assert outcome_of(STEP, ok=50, failed=70) == lost
    assert outcome_of(STEP, ok=10, dropped=30)[1].endswith("30 of 40 episodes had no token to train")
    assert outcome_of(STEP, idle, ok=70, failed=50)[0] == "unmeasured"
    assert outcome_of(STEP, steps=0, failed=9) == ("unmeasured", "")  # no episode has a reward
    rolled_out = {"reward/mean": 0.25, "success/rate": 0.5, "episodes/total": 16.0}
    assert outcome_of(rolled_out, steps=0)[1] == "16 episodes, mean reward 0.25, success 50%; nothing was trained"


def test_a_run_that_cannot_tell_says_what_to_add() -> None:
    assert outcome_of(STEP) == ("unmeasured", "cannot tell whether it learned: the run has no validation with a result")
    assert "  - set trainer_common.val_before_train: True" in described(None, 0.48)


def test_supervised_training_is_measured_by_its_loss() -> None:
    fell = ("learned", "it learned: loss on the validation transcripts 2 → 1.5")
    assert outcome_of({"val/loss": 2.0}, STEP, {"val/loss": 1.5}) == fell
    assert outcome_of({"val/loss": 2.0}, {"val/loss": 2.5})[0] == "worse"
    assert outcome_of(STEP, {"val/loss": 2.5}, {"val/loss": 1.5})[0] == "unmeasured"  # not before the training


def test_an_unfinished_run_is_compared_by_its_validations_so_far() -> None:
    rows = [
        MetricsRow(step, 0.0, {"val/success_rate": rate, "val/episodes": 100.0})
        for step, rate in ((0, 0.1), (10, 0.3), (20, 0.6))
    ]
    verdict = run_verdict(None, rows)
    assert verdict.outcome == "learned"
    assert verdict.lines[0].startswith("it learned: success 10.0% ± 7 on 100 episodes → 60.0% ± 10 on 100 episodes")
    assert run_verdict(None, rows[:1]).outcome == "unmeasured"
    assert run_verdict(None, []).lines == ()


ENTRY = EpisodeEntry(0, "val", "t", "e", 0, "ok", 0.0, False, None, 1, 1, 0, 1, 1, 0, 1.0, None, "path")


def test_a_task_that_became_solved_is_shown() -> None:
    first = [replace(ENTRY, task_id=task) for task in "abc"]
    last = [
        replace(ENTRY, step=8, task_id=task, reward=reward) for task, reward in zip("abc", (0.9, 1.0, 2.0), strict=True)
    ]
    last[1] = replace(last[1], is_success=True)
    middle = [replace(ENTRY, step=4, reward=9.0, is_success=True)]
    assert choose_task([*first, *middle, *last]) == (first[1], last[1])
    assert choose_task(first) is None
    assert choose_task(last) is None
    assert choose_task([replace(ENTRY, split="train")]) is None


def test_a_training_run_ends_with_a_task_before_and_after(train: Command, folder: Path) -> None:
    out = train("trainer_common.val_before_train=true").out
    record = folder / "launcher_record/run"
    for text in (out, (record / "run.log").read_text()):
        assert "backbone auto is local: this machine has" in text
    assert "backbone: local" in (record / "config.yaml").read_text()
    assert "a validation task: 'another" in out
    assert "── before, reward" in out
    assert "── after step 2, reward" in out
    assert "no clear change: success " in out
    assert "── before" not in train("trainer_common.val_before_train=false").out


def test_the_exit_code_may_follow_the_verdict(astuner: Command) -> None:
    words = ("--conf", "run.yaml", "astuner.trainer_common.val_before_train=true", "--require")
    assert astuner(*words, "not-worse").code == 0
    assert astuner(*words, "learned").code == 3
    assert "needs a training" in astuner("--conf", "run.yaml", "--backbone=debug", "--require=learned").out
