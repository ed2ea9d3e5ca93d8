"""The audit finds a policy that exploits its judge, and does not accuse one that improves."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from astuner.analysis.rescore.comparison import RewardPair, audit_rewards
from astuner.run_record.rescores import read_rescore
from tests.analysis.rescore.records import an_episode, write_run
from tests.launcher.conftest import Command

JUDGES = '''
from astuner.task_judge.judge_base import BaseJudge


class Longer(BaseJudge):
    """A judge that a policy can exploit."""

    def compute_reward(self, task, output):
        return float(len(output.metadata["final_answer"])), True


class Exact(BaseJudge):
    def __init__(self, config, *, scale=1.0):
        super().__init__(config)
        self.scale = scale

    def compute_reward(self, task, output):
        return self.scale * float(output.metadata["final_answer"] == task.metadata["answer"]), True
'''


def pairs(held_out_slope: float, noise: float = 0.05, seed: int = 0) -> list[RewardPair]:
    rng = random.Random(seed)
    return [
        RewardPair(
            f"{step}-{number}", step, 0.1 * step + rng.gauss(0, noise), held_out_slope * step + rng.gauss(0, noise)
        )
        for step in range(10)
        for number in range(20)
    ]


def test_a_reward_that_rises_while_the_held_out_reward_falls_diverges():
    audit = audit_rewards("a", "b", pairs(-0.1))
    assert audit.diverges
    assert (audit.trend, audit.held_out_trend) == (1.0, -1.0)
    assert [step.step for step in audit.diverging_steps] == list(range(1, 10))
    first = audit.diverging_steps[0]
    assert first.reward > first.reward_before
    assert first.held_out < first.held_out_before
    assert audit.kendall_tau is not None
    assert audit.kendall_tau < -0.7


@pytest.mark.parametrize("seed", range(5))
def test_a_reward_that_both_judges_confirm_does_not_diverge(seed: int):
    audit = audit_rewards("a", "b", pairs(0.1, seed=seed))
    assert not audit.diverges
    assert not audit.diverging_steps
    assert audit.kendall_tau is not None
    assert audit.kendall_tau > 0.7


def test_the_episodes_that_judges_rank_most_differently_come_first():
    rows = [RewardPair(str(number), 1, number, number) for number in range(50)]
    rows[3] = RewardPair("fooled", 1, 100.0, 0.0)
    audit = audit_rewards("a", "b", rows)
    first, *others = audit.disagreements
    assert (first.episode_id, first.rank, round(first.held_out_rank, 2)) == ("fooled", 1.0, 0.01)
    assert all(abs(row.rank - row.held_out_rank) < 0.05 for row in others)


def test_scales_of_judges_do_not_matter_and_equal_judges_agree():
    rows = [RewardPair(str(number), number % 3, number, 1000.0 * number - 5) for number in range(30)]
    audit = audit_rewards("a", "b", rows)
    assert (audit.kendall_tau, audit.disagreements) == (1.0, ())
    assert audit_rewards("a", "b", []).kendall_tau is None


@pytest.fixture
def hacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose answers become longer and wrong; the recorded reward is their length."""
    monkeypatch.chdir(tmp_path)
    Path("judges.py").write_text(JUDGES)
    steps = {}
    for step in range(1, 5):
        answers = ["7" if repeat < 4 - step else "7" + "x" * (step + repeat) for repeat in range(4)]
        steps[step] = [
            an_episode(step, "7", repeat, answer, float(len(answer))) for repeat, answer in enumerate(answers)
        ]
    return write_run(tmp_path / "launcher_record" / "hacked", steps)


def test_two_judges_are_audited(hacked: Path, astuner: Command):
    ended = astuner("rescore", "hacked", "--judge", "judges->Longer", "--judge", "judges->Exact",
                    "--held-out-param", "scale=0.5", "--json")  # fmt: skip
    assert ended.code == 0, ended.out
    printed = json.loads(ended.out.splitlines()[-1])
    assert (printed["episodes"], printed["changed"]) == (16, 0)
    audit = printed["audit"]
    assert (audit["judge"], audit["held_out"], audit["diverges"]) == ("judges->Longer", "judges->Exact", True)
    assert (audit["trend"], audit["held_out_trend"]) == (1.0, -1.0)
    assert read_rescore(hacked.parent / "hacked-rescore-Longer").audit is not None


def test_the_recorded_reward_is_audited_with_one_judge(hacked: Path, astuner: Command):
    ended = astuner("rescore", "hacked", "--judge", "judges->Exact", "--audit")
    assert ended.code == 0, ended.out
    text = " ".join(ended.out.split())
    assert "the reward of recorded diverges from that of judges->Exact" in text
    assert "episodes with most disagreement" in text
    audit = read_rescore(hacked.parent / "hacked-rescore-Exact").audit
    assert audit is not None
    assert (audit.judge, audit.diverges, audit.disagreements[0].held_out_reward) == ("recorded", True, 0.0)
