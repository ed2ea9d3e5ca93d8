"""`astuner replay` and `astuner bisect` name an injected change in the record of a deterministic run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from astuner import AstunerJob
from astuner.backbone.local.policy import Optimizer
from astuner.cli.main import astuner
from astuner.run_record import read_index
from astuner.run_record.episodes import EpisodeEntry

MakeJob = Callable[..., AstunerJob]


@pytest.fixture
def record(make_job: MakeJob, tmp_path: Path) -> Path:
    """The record of a deterministic run of three steps with the checkpoints of the last two."""
    return make_job(trainer_common__deterministic=True).tune(tmp_path / "first").record


def outcome(*arguments: object) -> tuple[int, dict[str, Any]]:
    """The exit code of a command and its JSON object."""
    result = CliRunner().invoke(astuner, [*map(str, arguments), "--json"], standalone_mode=False)
    assert result.exception is None, result.exception
    assert result.stderr == ""
    return result.return_value, json.loads(result.stdout)


def copy_of(record: Path, name: str) -> Path:
    copy = record.parent.parent / name
    shutil.copytree(record, copy)
    return copy


def trained(record: Path, step: int) -> EpisodeEntry:
    """The second trained episode of a step that has an advantage."""
    entries = [each for each in read_index(record) if each.split == "train" and each.step == step and each.advantage]
    return entries[1]


def edit(record: Path, entry: EpisodeEntry, keys: Sequence[str | int], change: float) -> float:
    """Add `change` to a number in an episode's file, and return the new number."""
    path = record / entry.path
    document = json.loads(path.read_bytes())
    inner: Any = document
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] += change
    path.write_text(json.dumps(document))
    return float(inner[keys[-1]])


def edit_metric(record: Path, step: int, name: str, change: float) -> None:
    path = record / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if row["step"] == step and name in row.get("metrics", row):
            row.get("metrics", row)[name] += change
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_injected_changes_are_named(make_job: MakeJob, record: Path, tmp_path: Path):
    # Another run with the same seed is equal.
    again = make_job(trainer_common__deterministic=True, rollout__max_env_worker=3).tune(tmp_path / "again").record
    code, found = outcome("bisect", record, again)
    assert (code, found["first"], found["steps"]) == (1, None, 3)
    assert [key for key, _, _ in found["keys"]] == ["astuner.rollout.max_env_worker"]
    code, found = outcome("bisect", record, copy_of(record, "equal"))
    assert (code, found["equal"], found["keys"]) == (0, True, [])

    # A step from a checkpoint, one from the starting model, and one with an update in between.
    for step, checkpoint in ((3, 2), (1, 0), (2, 0)):
        code, found = outcome("replay", record, "--step", step)
        assert (code, found["differences"], found["is_exact"], found["checkpoint"]) == (0, [], True, checkpoint)
        assert {"loss/policy", "loss/total", "grad_norm", "lr"} <= {metric["name"] for metric in found["metrics"]}

    entry = trained(record, 3)
    sampled = read_sample(record, entry)
    place = {"step": 3, "episode_id": entry.episode_id, "task_id": entry.task_id, "split": "train"}

    # The logprob of a token.
    changed = copy_of(record, "logprob")
    edit(changed, entry, ["episode", "calls", 0, "logprobs", 2], 0.5)
    edit(changed, entry, ["episode", "samples", 0, "logprobs", sampled[2]], 0.5)
    code, found = outcome("bisect", record, changed)
    assert code == 1
    assert found["first"] | place | {"kind": "logprob", "call": 1, "position": 2} == found["first"]
    code, found = outcome("replay", changed, "--step", 3)
    assert code == 1
    token = f"token {sampled[2]} of sample 1 of episode {entry.episode_id}"
    assert found["differences"][0].startswith(f"step 3: logprob of {token}: the engine recorded")

    # A token.
    changed = copy_of(record, "token")
    edit(changed, entry, ["episode", "calls", 1, "completion_ids", 0], 1)
    code, found = outcome("bisect", record, changed)
    assert found["first"] | place | {"kind": "token", "call": 2, "position": 0} == found["first"]

    # A reward.
    changed = copy_of(record, "reward")
    edit(changed, entry, ["episode", "reward"], 0.25)
    code, found = outcome("bisect", record, changed)
    assert found["first"] | place | {"kind": "reward", "call": None} == found["first"]
    assert found["first"]["second"] == found["first"]["first"] + 0.25
    code, found = outcome("replay", changed, "--step", 3)
    assert (code, found["checkpoint"]) == (1, 2)
    assert found["differences"][0].startswith("step 3: advantage of episode ")
    assert entry.task_id in found["differences"][0]

    # An advantage.
    changed = copy_of(record, "advantage")
    edit(changed, entry, ["advantage"], 0.125)
    code, found = outcome("bisect", record, changed)
    assert found["first"] | place | {"kind": "advantage"} == found["first"]
    code, found = outcome("replay", changed, "--step", 3)
    assert found["differences"][0].startswith(f"step 3: advantage of episode {entry.episode_id}: recorded ")

    # The gradient.
    changed = copy_of(record, "gradient")
    edit_metric(changed, 2, "grad_norm", 1e-9)
    code, found = outcome("bisect", record, changed)
    assert (code, found["first"]["kind"], found["first"]["step"]) == (1, "gradient", 2)
    assert outcome("bisect", record, changed, "--tolerance", 1e-6)[0] == 0
    code, found = outcome("replay", changed, "--step", 2)
    assert (code, found["differences"][0].split(":")[1]) == (1, " grad_norm")

    # The learning rate, in the configuration and in the record.
    changed = copy_of(record, "rate")
    config = (changed / "config.yaml").read_text()
    assert "lr: 0.01" in config
    (changed / "config.yaml").write_text(config.replace("lr: 0.01", "lr: 0.02"))
    code, found = outcome("bisect", record, changed)
    assert (code, found["keys"]) == (1, [["astuner.trainer_common.optim.lr", 0.01, 0.02]])
    code, found = outcome("replay", changed, "--step", 1)
    assert (code, found["differences"][0]) == (1, "step 1: lr: recorded 0.01, computed 0.02")


def test_a_learning_rate_that_changes_during_a_run(make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # The trainer computes the logprobs of the second mini-batch after an update with the other learning rate.
    settings = {"trainer_common__deterministic": True, "trainer_common__mini_batch_num": 2}
    first = make_job(**settings).tune(tmp_path / "first").record
    lr = Optimizer.lr
    monkeypatch.setattr(Optimizer, "lr", lambda self, step: lr(self, step) / (2 if step > 1 else 1))
    second = make_job(**settings).tune(tmp_path / "second").record
    monkeypatch.undo()
    code, found = outcome("bisect", first, second)
    expected = {"kind": "metric", "name": "lr", "step": 2, "first": 0.01, "second": 0.005}
    assert (code, found["keys"], found["first"] | expected) == (1, [], found["first"])
    code, found = outcome("replay", second, "--step", 3)
    assert (code, found["checkpoint"]) == (1, 2)
    assert found["differences"][0] == "step 3: lr: recorded 0.005, computed 0.01"
    assert any("trainer's logprob" in text for text in found["differences"])
    assert outcome("replay", first, "--step", 3)[0] == 0

    # A token of each mini-batch, which is one group.
    entries = [each for each in read_index(first) if each.split == "train" and each.step == 3 and each.advantage]
    of_groups = {entry.task_id: entry for entry in entries}
    assert len(of_groups) == 2
    for entry in of_groups.values():
        changed = copy_of(first, entry.episode_id)
        position = read_sample(first, entry)[1]
        edit(changed, entry, ["episode", "samples", 0, "token_ids", position], 1)
        code, found = outcome("replay", changed, "--step", 3)
        assert code == 1
        token = f"token {position} of sample 1 of episode {entry.episode_id}"
        assert found["differences"][0].startswith(f"step 3: logprob of {token}: the engine recorded")


def test_a_step_with_a_teacher(make_job: MakeJob, tmp_path: Path):
    settings = {
        "trainer_common__deterministic": True,
        "trainer_common__total_training_steps": 2,
        "trainer_common__distillation__teacher": "self",
        "trainer_common__distillation__hint": "Use letters: {unlucky}",
        "trainer_common__distillation__reward_coef": 1.0,
    }
    record = make_job(**settings).tune(tmp_path / "first").record
    code, found = outcome("replay", record, "--step", 2)
    assert (code, found["differences"], found["is_exact"], found["checkpoint"]) == (0, [], True, 1)
    assert not any(metric["name"].startswith("distillation/") for metric in found["metrics"])
    # Each token has an advantage of its own, from which the loss is computed.
    entry = trained(record, 2)
    advantages = json.loads((record / entry.path).read_bytes())["updates"][0]["advantages"]
    assert len(advantages) > 2
    changed = copy_of(record, "advantage")
    edit(changed, entry, ["updates", 0, "advantages", 1, 1], advantages[1][1])  # doubled, which float32 represents
    code, found = outcome("replay", changed, "--step", 2)
    assert code == 1
    assert found["differences"][0].startswith("step 2: loss/policy: recorded ")


def read_sample(record: Path, entry: EpisodeEntry) -> list[int]:
    """The indices of the trained tokens of an episode's first sample."""
    sample = json.loads((record / entry.path).read_bytes())["episode"]["samples"][0]
    return [index for index, count in enumerate(sample["loss_mask"]) if count]


def test_a_step_that_cannot_be_computed_names_those_that_can(make_job: MakeJob, tmp_path: Path):
    record = make_job(trainer_common__total_training_steps=1).tune(tmp_path / "records").record
    runner = CliRunner()

    def refused(*arguments: object) -> str:
        result = runner.invoke(astuner, [*map(str, arguments)])
        assert result.exit_code == 2, result.output
        return " ".join(result.output.split())

    assert "has no update of step 7; these steps can be computed again: 1" in refused("replay", record, "--step", 7)
    assert "is not a run" in refused("replay", tmp_path / "nothing", "--step", 1)
    assert "is not a run" in refused("bisect", record, tmp_path / "nothing")


@pytest.mark.parametrize("parent", [".", "project"])
def test_the_starting_model_is_that_of_the_run_and_not_the_tuned_one(
    make_job: MakeJob, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parent: str
):
    """Its path is relative to the working directory of the run, or to the folder of its YAML file."""
    (tmp_path / "work" / "project").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    shutil.copytree(model_folder, Path(parent) / "model")
    # Its path relative to the run's folder is that of the tuned model.
    job = make_job(model__path="model", trainer_common__total_training_steps=1, trainer_common__deterministic=True)
    job.dump_job_as_yaml("project/agent.yaml")
    command = ["--conf", "project/agent.yaml", "--exp-dir", str(tmp_path / "records")]
    assert CliRunner().invoke(astuner, command).exit_code == 0
    record = tmp_path / "records" / "run"
    monkeypatch.chdir(tmp_path)
    assert outcome("replay", record, "--step", 1)[0] == 0
    shutil.rmtree(tmp_path / "work" / parent / "model")
    result = CliRunner().invoke(astuner, ["replay", str(record), "--step", "1"])
    assert result.exit_code == 2, result.output
    assert "cannot be computed again without its starting model" in " ".join(result.output.split())
