"""Slips in a file or on the command line: the message says what to write."""

from __future__ import annotations

from pathlib import Path

import pytest

from astuner.config.loading import load_config
from astuner.errors import ConfigError

VALID = "astuner:\n  model: {path: m}\n  rollout: {agentscope_workflow: a->B}\n"


def message(*overrides: str, path: str = "run.yaml") -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(Path(path), list(overrides))
    return str(caught.value)


@pytest.fixture(autouse=True)
def _file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(VALID)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("astuner.rollout.num_repeat =1", "has a space beside the equals sign; write astuner.rollout.num_repeat=1"),
        ("astuner.rollout.num_repeat", "has no value; write astuner.rollout.num_repeat=VALUE"),
        ("something", "is not key=value; write KEY=VALUE"),
        ("~verl", "verl is a whole section; remove single keys: ~verl.KEY"),
        ("~trinity", "remove single keys: ~trinity.KEY"),
        ("trinity=abc", "trinity is 'abc'; expected a section with keys below it: write trinity.KEY=VALUE"),
        ("astuner.trainer_common.logger={}", "is {}; expected a list of console, tensorboard, wandb, swanlab, trackio"),
        ("astuner.trainer_common.logger=3", "is 3; expected a list of console, tensorboard, wandb, swanlab, trackio"),
        ("astuner.trainer_common.logger=[wandb,3]", "is 3; expected 'console', 'tensorboard', 'wandb'"),
        ("astuner.model.path=[1,2", "has characters with a meaning in Hydra's grammar"),
        ("astuner.model.path={a", "quote the value, and the whole from the shell: \"astuner.model.path='{a'\""),
        ("astuner.rollout.workflow=x", "did you mean 'astuner.rollout.agentscope_workflow'?"),
        ("astuner.trainer_common.algorithm.adv_estimator=GRPO", "did you mean 'grpo'?"),
        ("astuner.rollout.num_repeat=1:30", "is '1:30'; expected a whole number"),
        ("astuner.trainer_common.logger=[wandbb]", "'wandbb'; expected 'console', 'tensorboard', 'wandb'"),
    ],
)
def test_overrides(override: str, said: str) -> None:
    text = message(override)
    assert text.startswith("command line: ")
    assert said in text
    for foreign in ("token recognition", "EOF", "defaults list", "OmegaConf", "Traceback"):
        assert foreign not in text


@pytest.mark.parametrize("value", ["a=b", "agent->B", "http://h:1/?a=b&c=d", "a>b", "!x", "a b"])
def test_text_needs_no_quotes_beside_those_of_the_shell(value: str) -> None:
    assert load_config(Path("run.yaml"), [f"astuner.model.path={value}"]).config.astuner.model.path == value


def test_numbers_that_are_written_with_another_base() -> None:
    Path("run.yaml").write_text(VALID + "  trainer_common: {seed: 0x10}\n")
    assert load_config(Path("run.yaml")).config.astuner.trainer_common.seed == 16


def test_one_episode_per_task_is_enough_for_debug() -> None:
    one = ["astuner.rollout.num_repeat=1"]
    assert load_config(Path("run.yaml"), one, "debug").config.astuner.rollout.num_repeat == 1
    assert "must be at least 2" in message(*one)


def test_an_item_of_a_list_of_the_command_line_is_not_attributed_to_the_file() -> None:
    Path("run.yaml").write_text(VALID + "  trainer_common: {logger: [console]}\n")
    assert message("astuner.trainer_common.logger=[wandbb]").startswith("command line: ")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "astuner:\n  model:\n    path: m\n   data:\n    x: 2\n",
            "bad.yaml:4, column 4: the line is not indented",
        ),
        (
            "astuner:\n  model:\n    path: m\n      renderer: x\n",
            "(4 spaces):     path: m\n    line 4 (6 spaces):",
        ),
        ("astuner:\n\tmodel:\n", "bad.yaml:2, column 1: the line is indented with a tab; indent with spaces"),
        ("astuner:\n  seed: 1\n  seed: 2\n", "bad.yaml:3, column 3: 'seed' is twice in the same section; remove one"),
        ("astuner:\n  seed: 010\n", "bad.yaml:2: astuner.seed is 010, which YAML reads as 8; write plain digits"),
        ("astuner:\n  seed: 1:30\n", "bad.yaml:2: astuner.seed is 1:30, which YAML reads as 90; write plain digits"),
        ("astuner:\n  seed: 1:30.5\n", "is 1:30.5, which YAML reads as 90.5; write plain digits"),
        ("astuner: {model: 1\n", "bad.yaml:2, column 1: not valid YAML"),
    ],
)
def test_layout_of_a_file(text: str, said: str) -> None:
    Path("bad.yaml").write_text(text)
    assert said in message(path="bad.yaml")


def test_other_files_and_folders() -> None:
    Path("agent.py").write_text("import os\nx: int = {1: 2}\n")
    assert "agent.py is a Python file; --conf expects a YAML file" in message(path="agent.py")
    Path("bad.yaml").write_bytes(b"astuner:\n  project_name: caf\xe9\n")
    assert "is not UTF-8 text (byte 28); save it as UTF-8" in message(path="bad.yaml")
    Path("bad.yaml").unlink()
    assert message(path=".") == ". is a folder; expected a YAML file; did you mean run.yaml?"


def test_a_huge_value_is_shortened() -> None:
    text = message(f"astuner.rollout.num_repeat='{'x' * 100_000}'", f"astuner.{'y' * 100_000}=1")
    assert "x" * 20 in text
    assert "y" * 20 in text
    assert len(text) < 2000
