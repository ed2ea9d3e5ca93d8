"""Which keys may differ when a run resumes."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from astuner.config.keys import dotted, parts, schema
from astuner.config.root import RunConfig
from astuner.config.yaml_file import to_yaml
from astuner.launcher.resume import KeyChange, Locations, changed_keys

HERE = Locations((Path.cwd(),), (Path.cwd(),))


@cache
def defaults() -> dict[str, Any]:
    """The content of config.yaml with the default of each key."""
    content: dict[str, Any] = yaml.safe_load(to_yaml(RunConfig()))
    return content


def tree(**values: Any) -> dict[str, Any]:
    """The content of config.yaml, with changed keys: `a__b` stands for `astuner.a.b`."""
    content = deepcopy(defaults())
    for name, value in values.items():
        *sections, key = ["astuner", *name.split("__")]
        section = content
        for part in sections:
            section = section[part]
        section[key] = value
    return content


def rejected(earlier: dict[str, Any], now: dict[str, Any], locations: Locations = HERE) -> list[str]:
    return [str(change) for change in changed_keys(earlier, now, locations) if not change.allowed]


def test_every_key_states_how_it_may_differ() -> None:
    """If this fails for a new key: add `resume=` to its `key(...)`; see `ResumeRule`."""
    assert [dotted(path) for path, key in schema().keys.items() if key.resume is None] == []


def test_every_key_has_an_effect_according_to_its_rule() -> None:
    for path, key in schema().keys.items():
        now = tree()
        section: Any = now
        for part in path[:-1]:
            section = section[part]
        section[path[-1]] = {"x": 1} if key.free_form else "another value"
        changes = changed_keys(tree(), now, HERE)
        assert changes, dotted(path)
        assert all(parts(change.key)[: len(path)] == path for change in changes)
        if key.resume != "more":
            assert {change.allowed for change in changes} == {key.resume == "any"}, dotted(path)


def test_equal_configurations_have_no_changes() -> None:
    assert changed_keys(tree(), tree(), HERE) == []


@pytest.mark.parametrize(
    "values",
    [
        {"experiment_dir": "/elsewhere/run", "experiment_name": "other", "project_name": "other"},
        {"trainer_common__logger": ["console", "wandb"], "trainer_common__max_checkpoints_to_keep": 7},
        {"trainer_common__save_freq": 1, "trainer_common__test_freq": 3},
        {"deadlines__update": 5.0, "debug__debugger_port": 7000, "services": {"a": {"command": "x"}}},
        {"trainer_common__total_training_steps": 9, "trainer_common__total_epochs": 60},
        {"trainer_common__total_training_steps": None},
        {"trainer_common__max_tokens_per_micro_batch": 99, "model__gradient_checkpointing": True},
    ],
)
def test_the_same_run(values: dict[str, Any]) -> None:
    earlier = tree(trainer_common__total_training_steps=4)
    assert rejected(earlier, tree(**{"trainer_common__total_training_steps": 4, **values})) == []


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"trainer_common__optim__lr": 2e-6}, "astuner.trainer_common.optim.lr: 1e-06 → 2e-06"),
        ({"trainer_common__seed": 1}, "astuner.trainer_common.seed: 42 → 1"),
        ({"trainer_common__total_training_steps": 3},
         "astuner.trainer_common.total_training_steps: 4 → 3 (it may only become larger)"),
        ({"trainer_common__total_epochs": 49},
         "astuner.trainer_common.total_epochs: 50 → 49 (it may only become larger)"),
        ({"data__shuffle": False}, "astuner.data.shuffle: True → False"),
        ({"data__shuffle": 1}, "astuner.data.shuffle: True → 1"),
        ({"model__path": "other"}, "astuner.model.path: '' → 'other'"),
        ({"trainer_common__optim__betas": [0.9, 0.9]}, "astuner.trainer_common.optim.betas: [0.9, 0.999] → [0.9, 0.9]"),
        ({"rollout__frozen_models": {"user": {"model": "m"}}},
         "astuner.rollout.frozen_models.user: None → {'model': 'm'}"),
    ],
)  # fmt: skip
def test_another_run_names_each_key(values: dict[str, Any], text: str) -> None:
    earlier = tree(trainer_common__total_training_steps=4)
    assert rejected(earlier, tree(**{"trainer_common__total_training_steps": 4, **values})) == [text]


def test_keys_of_trainers_are_compared_one_by_one() -> None:
    earlier, now = tree(), tree()
    earlier["verl"], now["verl"] = {"trainer": {"a": 1, "b": 2}}, {"trainer": {"a": 1, "b": 3}}
    assert rejected(earlier, now) == ["verl.trainer.b: 2 → 3"]


def test_keys_that_an_older_version_did_not_have_count_as_default() -> None:
    earlier = tree()
    del earlier["astuner"]["update"], earlier["astuner"]["rollout"]["top_k"]
    earlier["astuner"]["removed"] = {"key": 1}
    assert changed_keys(earlier, tree(), HERE) == []
    assert rejected(earlier, tree(rollout__top_k=5)) == ["astuner.rollout.top_k: -1 → 5"]


def test_redacted_values_are_not_compared() -> None:
    earlier, now = tree(), tree()
    earlier["verl"], now["verl"] = {"api_key": "[redacted]"}, {"api_key": "now in the clear"}
    assert changed_keys(earlier, now, HERE) == []


def moved(old: str, new: str, locations: Locations) -> list[KeyChange]:
    return changed_keys(
        tree(task_reader__dataset_file__training__file_path=old, rollout__agentscope_workflow=f"{old}->A"),
        tree(task_reader__dataset_file__training__file_path=new, rollout__agentscope_workflow=f"{new}->A"),
        locations,
    )


def test_files_may_be_named_in_another_way_or_move_with_their_project(tmp_path: Path) -> None:
    old, new, data = tmp_path / "old", tmp_path / "new", tmp_path / "data"
    for folder in (old, new, data):
        folder.mkdir()
    for file in (old / "a.py", new / "a.py", new / "b.py", data / "a.py"):
        file.write_text("")
    (tmp_path / "link").symlink_to(old)
    stayed, went = Locations((old,), (old,)), Locations((old,), (new,))
    assert not moved("a.py", str(old / "a.py"), stayed)
    assert not moved(str(old / "a.py"), "./a.py", stayed)
    assert not moved(str(tmp_path / "link/a.py"), "a.py", stayed)
    assert not moved(str(old / "a.py"), str(new / "a.py"), went)
    assert not moved(str(tmp_path / "gone/a.py"), str(data / "a.py"), stayed)
    assert moved("a.py", "b.py", went)
    assert moved(str(old / "a.py"), str(data / "a.py"), stayed)
    assert moved(str(tmp_path / "gone/a.py"), str(tmp_path / "gone too/a.py"), stayed)
    changes = changed_keys(
        tree(rollout__agentscope_workflow="a.py->A"), tree(rollout__agentscope_workflow="a.py->B"), stayed
    )
    assert [change.allowed for change in changes] == [False]
