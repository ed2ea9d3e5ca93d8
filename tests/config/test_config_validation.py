"""Types and bounds: pydantic's findings as calm lines."""

from __future__ import annotations

from typing import Any

import pytest

from astuner.config.keys import parts, value_at
from astuner.config.root import RunConfig
from astuner.config.validation import validate


def one_problem(key: str, value: object) -> str:
    tree: dict[str, Any] = {}
    node = tree
    *path, last = key.split(".")
    for part in path:
        node = node.setdefault(part, {})
    node[last] = value
    config, problems = validate(tree, {parts(key): "run.yaml:3"})
    (problem,) = problems
    assert config == RunConfig()
    assert problem.where == "run.yaml:3"
    return problem.text


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("astuner.rollout.num_repeat", "four", "a whole number"),
        ("astuner.rollout.num_repeat", 2.5, "a whole number"),
        ("astuner.rollout.num_repeat", [4], "a whole number"),
        ("astuner.rollout.num_repeat", None, "a whole number"),
        ("astuner.rollout.num_repeat", True, "a number"),
        ("astuner.rollout.num_repeat", 0, "a number greater than 0"),
        ("astuner.trainer_common.optim.lr", "fast", "a number"),
        ("astuner.trainer_common.optim.lr", True, "a number"),
        ("astuner.trainer_common.optim.lr", 0.0, "a number greater than 0"),
        ("astuner.trainer_common.optim.lr", float("inf"), "a finite number"),
        ("astuner.trainer_common.algorithm.clip_ratio_low", True, "a number"),
        ("astuner.rollout.top_p", 1.5, "a number of at most 1"),
        ("astuner.rollout.top_k", -2, "a number of at least -1"),
        ("astuner.rollout.top_k", 0, "-1 (all) or a number of at least 1"),
        ("astuner.model.lora.dropout", 1, "a number less than 1"),
        ("astuner.trainer_common.use_kl_loss", "nein", "true or false"),
        ("astuner.project_name", 2024, "text (in quotes if YAML reads it as another type)"),
        ("astuner.task_reader.huggingface_dat_repo.training_split", True,
         "text (in quotes if YAML reads it as another type)"),
        ("astuner.trainer_common.logger", "console", "a list of console, tensorboard, wandb, swanlab, trackio"),
        ("astuner.trainer_common.optim.betas", 0.9, "a list"),
        ("astuner.rollout", [1], "a section with keys below it"),
        ("astuner.rollout", "fast", "a section with keys below it"),
        ("verl", "x", "a mapping"),
        ("astuner.model.renderer", 3,
         "text (in quotes if YAML reads it as another type) or a mapping"),
        ("astuner.experiment_name", "a/b", "a valid folder name, without / and \\"),
        ("astuner.experiment_name", "..", "a valid folder name, without / and \\"),
        ("astuner.model.dtype", "float31", "'auto', 'float32', 'bfloat16' or 'fastest'; did you mean 'float32'?"),
        ("astuner.model.dtype", 3, "'auto', 'float32', 'bfloat16' or 'fastest'"),
    ],
)  # fmt: skip
def test_a_wrong_value_names_itself_and_what_was_expected(key: str, value: object, expected: str) -> None:
    assert one_problem(key, value) == f"{key} is {value!r}; expected {expected}"


def test_a_wrong_item_of_a_list_is_named() -> None:
    tree = {"astuner": {"trainer_common": {"logger": ["console", "wandbb"], "optim": {"betas": [0.9, 1.5]}}}}
    origins = {
        ("astuner", "trainer_common", "logger"): "run.yaml:3",
        ("astuner", "trainer_common", "logger", "1"): "run.yaml:5",
        ("astuner", "trainer_common", "optim", "betas"): "run.yaml:7",
    }
    assert {str(problem) for problem in validate(tree, origins)[1]} == {
        "run.yaml:5: an item of astuner.trainer_common.logger is 'wandbb'; expected 'console', 'tensorboard', "
        "'wandb', 'swanlab' or 'trackio'; did you mean 'wandb'?",
        "run.yaml:7: an item of astuner.trainer_common.optim.betas is 1.5; expected a number less than 1",
    }


def test_good_values_stay_beside_wrong_ones() -> None:
    tree = {"astuner": {"rollout": {"num_repeat": 0, "top_p": 0.5}, "data": {"train_batch_size": "12"}}}
    config, problems = validate(tree, {})
    assert len(problems) == 1
    assert value_at(config, parts("astuner.rollout.top_p")) == 0.5
    assert value_at(config, parts("astuner.rollout.num_repeat")) == 4
    assert value_at(config, parts("astuner.data.train_batch_size")) == 12
    assert tree["astuner"]["rollout"]["num_repeat"] == 0
