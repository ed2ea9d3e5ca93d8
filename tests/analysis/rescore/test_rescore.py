"""`astuner rescore`: the comparison, the record that it leaves, and its errors."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from astuner.run_record import read_index
from astuner.run_record.record import RunRecord
from astuner.run_record.rescores import find_rescores, read_rescore, read_rescored_episodes
from astuner.schema import Anomaly
from astuner.task_rollout.statistics import tokens_of
from tests.analysis.rescore.records import an_episode, contents, write_run
from tests.launcher.conftest import Command, Ended

JUDGES = """
import time

from astuner.errors import UnscoredError
from astuner.schema import Judgement
from astuner.task_judge.judge_base import BaseGroupJudge, BaseJudge


class Exact(BaseJudge):
    def compute_reward(self, task, output):
        right = output.metadata["final_answer"] == task.metadata["answer"]
        return float(right), right


class Opposite(BaseJudge):
    async def compute_reward(self, task, output):
        return float(output.metadata["final_answer"] != task.metadata["answer"]), True


class Scaled(BaseJudge):
    def __init__(self, config, *, factor):
        super().__init__(config)
        self.factor = factor

    def compute_reward(self, task, output):
        return self.factor * float(output.metadata["final_answer"] == task.metadata["answer"]), True


class Length(BaseJudge):
    def compute_reward(self, task, output):
        return float(len(output.calls[-1].messages[-1]["content"])), True


class PerAgent(BaseJudge):
    def compute_reward(self, task, output):
        right = float(output.metadata["final_answer"] == task.metadata["answer"])
        return Judgement(agent_rewards={"solver": right, "critic": 1 - right}, explanation="by agent")


class Ranks(BaseGroupJudge):
    groups = []

    def compute_reward(self, task, output):
        return 0.0, False

    def compute_group_rewards(self, task, outputs):
        self.groups.append((task.task_id, len(outputs)))
        return [(float(output.metadata["final_answer"] == task.metadata["answer"]), True) for output in outputs]


class Fails(BaseJudge):
    def compute_reward(self, task, output):
        raise UnscoredError("the service is busy", "rate_limit")


class Fussy(BaseJudge):
    def compute_reward(self, task, output):
        if output.metadata["final_answer"] == "slow":
            time.sleep(600)
        if output.metadata["final_answer"] == "raise":
            raise ValueError("no such answer")
        return self.after(output)

    async def after(self, output):
        return 0.25, True
"""


def shows(ended: Ended, *parts: str) -> None:
    """Check that a command succeeded and printed all parts."""
    text = " ".join(ended.out.split())
    assert ended.code == 0, ended.out
    assert not [part for part in parts if part not in text], ended.out


Rescored = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two steps with two groups of four; all rewards are right except for task 2 of step 2, which is rewarded 0."""
    monkeypatch.chdir(tmp_path)
    Path("judges.py").write_text(JUDGES)
    steps = {
        step: [
            an_episode(step, str(task), repeat, str(task) if repeat < 2 else "?",
                       float(repeat < 2) if (step, task) != (2, 2) else float(repeat >= 2))
            for task in (1, 2)
            for repeat in range(4)
        ]
        for step in (1, 2)
    }  # fmt: skip
    return write_run(tmp_path / "launcher_record" / "math", steps)


@pytest.fixture
def rescored(astuner: Command) -> Rescored:
    """Return a function that runs `astuner rescore … --json` and parses its output."""

    def call(*arguments: str) -> dict[str, Any]:
        ended = astuner("rescore", *arguments, "--json")
        assert ended.code == 0, ended.out
        # The notices on the other stream follow the output.
        printed: dict[str, Any] = json.loads(next(line for line in ended.out.splitlines() if line.startswith("{")))
        return printed

    return call


def test_the_same_rewards_change_nothing_and_wrong_ones_are_found(run: Path, rescored: Rescored):
    before = contents(run)
    printed = rescored("math", "--judge", "judges->Exact")
    assert printed.keys() == {"episodes", "changed", "sign_flips", "kendall_tau", "episodes_per_second"}
    assert (printed["episodes"], printed["changed"], printed["sign_flips"]) == (16, 4, 4)
    # 12 pairs of equal order within 8 right and 8 wrong: C - D = 36 - 4, of 64 untied pairs
    assert math.isclose(printed["kendall_tau"], 0.5)
    assert printed["episodes_per_second"] > 0
    assert contents(run) == before
    folder = run.parent / "math-rescore-Exact"
    first, second = read_rescore(folder).steps
    assert (first.step, first.changed, first.gradient_differs, first.kendall_tau) == (1, 0, False, 1.0)
    assert (second.step, second.changed, second.sign_flips, second.gradient_differs) == (2, 4, 4, True)
    assert first.similarity == pytest.approx(1.0)
    assert second.similarity == pytest.approx(0.0, abs=1e-6)
    flipped = [episode.episode_id for episode in read_rescored_episodes(folder) if episode.flips_sign]
    assert flipped == [f"2-2-{repeat}" for repeat in range(4)]
    recorded = {entry.episode_id: entry.advantage for entry in read_index(run)}
    for episode in read_rescored_episodes(folder):
        assert episode.advantage_before == pytest.approx(recorded[episode.episode_id])


def test_parameters_are_passed_and_scale_the_rewards_only(run: Path, rescored: Rescored, astuner: Command):
    printed = rescored("math", "--judge", "judges->Scaled", "--param", "factor=2", "--step", "1")
    assert (printed["episodes"], printed["changed"], printed["sign_flips"], printed["kendall_tau"]) == (8, 4, 0, 1.0)
    result = read_rescore(run.parent / "math-rescore-Scaled")
    assert result.params == {"factor": 2}
    assert result.steps_with_other_gradient == 0
    astuner("rescore", "math", "--judge", "judges->Scaled").says("needs factor")
    astuner("rescore", "math", "--judge", "judges->Scaled", "--param", "faktor=2").says("Did you mean factor?")


def test_async_judges_and_calls_are_supported(run: Path, rescored: Rescored):
    printed = rescored("math", "--judge", "judges->Opposite", "--step", "1")
    assert (printed["changed"], printed["sign_flips"], printed["kendall_tau"]) == (8, 8, -1.0)
    assert rescored("math", "--judge", "judges->Length", "--step", "1")["kendall_tau"] is None  # all have 13 characters


def test_rewards_of_agents_change_the_gradient_although_the_mean_is_equal(run: Path, rescored: Rescored):
    rescored("math", "--judge", "judges->PerAgent", "--step", "1")
    folder = run.parent / "math-rescore-PerAgent"
    assert read_rescore(folder).steps[0].gradient_differs
    episode = read_rescored_episodes(folder)[0]
    assert (episode.reward, episode.advantage) == (0.5, 0.0)
    assert episode.judgement is not None
    assert episode.judgement.agent_rewards == {"solver": 1.0, "critic": 0.0}
    assert episode.judgement.explanation == "by agent"


def test_a_judge_of_groups_gets_the_episodes_of_a_task_together(run: Path, rescored: Rescored):
    episodes = [
        an_episode(1, str(task), repeat, str(task) if repeat else "?", 1.0) for repeat in range(4) for task in (1, 2)
    ]
    write_run(run.parent / "apart", {1: episodes})
    assert rescored("apart", "--judge", "judges->Ranks")["changed"] == 2
    groups = sys.modules["judges"].Ranks.groups
    assert sorted(groups) == [("1", 4), ("2", 4)]
    rows = read_rescored_episodes(run.parent / "apart-rescore-Ranks")
    assert {row.episode_id for row in rows if row.is_changed} == {"1-1-0", "1-2-0"}


def test_each_result_has_its_own_folder(run: Path, rescored: Rescored, astuner: Command):
    for _ in range(2):
        rescored("math", "--judge", "judges->Exact")
    rescored("math", "--judge", "judges->Exact", "--output", "elsewhere/result")
    assert {"math-rescore-Exact", "math-rescore-Exact-2"} == find_rescores(run).keys()
    assert len(read_rescored_episodes(Path("elsewhere/result"))) == 16
    astuner("rescore", "math", "--judge", "judges->Exact", "--output", "elsewhere/result").says("not an empty folder")
    astuner("rescore", "math", "--judge", "judges->Exact", "--output", str(run / "x")).says("inside the run's folder")


def test_unscored_episodes_have_no_reward_and_are_counted(tmp_path: Path, run: Path, astuner: Command):
    answers = ["1", "raise", "slow", "1"]
    episodes = [an_episode(1, "1", repeat, answer, float(repeat)) for repeat, answer in enumerate(answers)]
    folder = write_run(tmp_path / "launcher_record" / "fussy", {1: episodes})
    ended = astuner("rescore", "fussy", "--judge", "judges->Fussy", "--jobs", "1", "--timeout", "5")
    shows(ended, "2 (1 judge, 1 timeout)", "no such answer", "4 changed")
    rows = read_rescored_episodes(folder.parent / "fussy-rescore-Fussy")
    assert [row.reward for row in rows] == [0.25, None, None, 0.25]
    assert [row.error_kind for row in rows] == [None, "judge", "timeout", None]
    assert [row.advantage is None for row in rows] == [False, True, True, False]


def test_a_judge_that_scores_nothing_is_an_error_and_leaves_no_folder(run: Path, astuner: Command):
    astuner("rescore", "math", "--judge", "judges->Fails").says("scored none of 16 episodes: the service is busy")
    assert not find_rescores(run)


def test_records_of_every_kind_are_judged(tmp_path: Path, run: Path, rescored: Rescored):
    parent = run.parent
    episodes = [an_episode(1, "1", repeat, "1" if repeat else "?", 0.5) for repeat in range(3)]
    for backbone in ("debug", "verl", "trinity"):
        write_run(parent / backbone, {1: episodes}, backbone=backbone)
        assert rescored(backbone, "--judge", "judges->Exact")["changed"] == 3
    write_run(parent / "math-eval", {0: episodes}, split="val")
    assert rescored("math-eval", "--judge", "judges->Exact")["episodes"] == 3
    for name in ("rloo", "reinforce++", "dapo", "dr_grpo"):
        write_run(parent / name, {1: episodes}, algorithm=name)
        assert rescored(name, "--judge", "judges->Exact")["changed"] == 3
    # The YAML of a run is missing: the default algorithm.
    write_run(parent / "bare", {1: episodes}, config="")
    assert rescored("bare", "--judge", "judges->Exact")["changed"] == 3


def test_a_live_run_is_judged_with_its_pending_step(run: Path, rescored: Rescored):
    episodes = [an_episode(1, "1", repeat, "1" if repeat else "?", 0.5) for repeat in range(4)]
    with RunRecord.open(run.parent / "live", backbone="local", config_yaml="", resume=False, loggers=()) as record:
        record.write_episode(1, "train", episodes[0], 0.5, tokens_of([episodes[0]]))
        record.begin_step(2, [(episode, tokens_of([episode])) for episode in episodes[1:]])
        with (record.folder / "episodes" / "index.jsonl").open("ab") as index:
            index.write(b'{"step": 3, "sp')  # a line that is being written
        assert rescored("live", "--judge", "judges->Exact")["episodes"] == 4


def test_failed_dropped_and_degenerate_episodes(run: Path, rescored: Rescored):
    anomaly = Anomaly("repetition", "repeats itself", "1-1-3/0", 1)
    episodes = [
        an_episode(1, "1", 0, "1", 1.0),
        an_episode(1, "1", 1, "?", None, status="failed", error_kind="unscored/rate_limit", error="busy"),
        an_episode(1, "1", 2, "?", None, status="failed", error_kind="workflow", error="KeyError"),
        an_episode(1, "1", 3, "1", -1.0, anomaly=anomaly),
        an_episode(1, "1", 4, "1", 0.0, status="dropped", error_kind="no_tokens"),
    ]
    write_run(run.parent / "mixed", {1: episodes})
    printed = rescored("mixed", "--judge", "judges->Exact")
    assert (printed["episodes"], printed["changed"]) == (3, 2)
    result = read_rescore(run.parent / "mixed-rescore-Exact")
    assert (result.skipped, result.kept, result.unscored) == (1, 1, 0)
    rows = {row.repeat_index: row for row in read_rescored_episodes(run.parent / "mixed-rescore-Exact")}
    assert (rows[1].reward_before, rows[1].reward, rows[1].advantage_before) == (None, 0.0, None)
    assert rows[1].advantage is not None
    assert (rows[3].reward_before, rows[3].reward) == (-1.0, -1.0)
    assert (rows[4].reward, rows[4].advantage) == (1.0, None)


def test_a_resumed_run_is_judged_once_per_episode(run: Path, rescored: Rescored):
    with RunRecord.open(run, backbone="local", config_yaml="", resume=True, loggers=()) as record:
        record.truncate_after(1)
        episode = an_episode(2, "9", 0, "9", 0.0)
        record.write_episode(2, "train", episode, 0.0, tokens_of([episode]))
    printed = rescored("math", "--judge", "judges->Exact")
    assert (printed["episodes"], printed["changed"]) == (9, 1)


def test_the_table_names_what_changes(run: Path, astuner: Command):
    ended = astuner("rescore", "math", "--judge", "judges->Exact")
    shows(ended, "16 judged", "4 changed; Kendall's tau 0.500", "4 with the other sign (grpo)")
    shows(ended, "1 of 2 steps would have differed", "math-rescore-Exact")


def test_errors_say_what_is_wrong(run: Path, astuner: Command):
    astuner("rescore", "maht", "--judge", "judges->Exact").says("'maht' is not a run", "did you mean 'math'?")
    astuner("rescore", "math", "--judge", "judges->Exat").says("Exat")
    astuner("rescore", "math", "--judge", "judges->Exact", "--step", "9").says("no train episodes of step 9")
    astuner("rescore", "math", "--judge", "judges->Exact", "--split", "val").says("no val episodes")
    ended = astuner("rescore", "math", "--judge", "judges->Exact", "--held-out-param", "a=1")
    assert "--held-out-param needs a second --judge" in ended.out
    assert "NAME=VALUE" in astuner("rescore", "math", "--judge", "judges->Exact", "--param", "a").out


def test_a_damaged_episode_is_named(run: Path, astuner: Command):
    path = run / read_index(run)[0].path
    path.write_text('{"format": 1, "episode": {"calls": 3}}')
    astuner("rescore", "math", "--judge", "judges->Exact").says(path.name, "contains no complete episode")
