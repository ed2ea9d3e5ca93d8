"""Command-line overrides: the forms of Hydra's grammar, and the errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from astuner.config.loading import load_config
from astuner.config.root import RunConfig
from astuner.errors import ConfigError

Write = Callable[..., Path]


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("astuner.trainer_common.optim.lr=1e-5", lambda config: config.astuner.trainer_common.optim.lr == 1e-5),
        ("astuner.trainer_common.logger=[console,wandb]",
         lambda config: config.astuner.trainer_common.logger == ["console", "wandb"]),
        ("astuner.trainer_common.optim.betas=[0.8,0.9]",
         lambda config: config.astuner.trainer_common.optim.betas == (0.8, 0.9)),
        ("astuner.trainer_common.algorithm.adv_estimator=reinforce++",
         lambda config: config.astuner.trainer_common.algorithm.adv_estimator == "reinforce++"),
        ("astuner.rollout.agentscope_workflow=tutorial.a_b/c.py->Flow",
         lambda config: config.astuner.rollout.agentscope_workflow == "tutorial.a_b/c.py->Flow"),
        ("astuner.rollout.agentscope_workflow='tutorial.a->Flow'",
         lambda config: config.astuner.rollout.agentscope_workflow == "tutorial.a->Flow"),
        ("astuner.model.path=/data/my models/Qwen2.5-7B",
         lambda config: config.astuner.model.path == "/data/my models/Qwen2.5-7B"),
        ("astuner.model.renderer={name: qwen3, thinking: true}",
         lambda config: config.astuner.model.renderer == {"name": "qwen3", "thinking": True}),
        ("astuner.val={num_repeat: 1}", None),
        ("astuner.rollout.val_kwargs={temperature: 0.5, num_repeat: 3}",
         lambda config: (config.astuner.rollout.val_kwargs.num_repeat, config.astuner.rollout.val_kwargs.top_p)
         == (3, 1.0)),
        ("++astuner.rollout.num_repeat=6", lambda config: config.astuner.rollout.num_repeat == 6),
        ("+astuner.rollout.num_repeat=6", lambda config: config.astuner.rollout.num_repeat == 6),
        ("+verl.trainer.x=[1,2]", lambda config: config.verl == {"trainer": {"x": [1, 2]}}),
        ("verl.trainer.x=4", lambda config: config.verl == {"trainer": {"x": 4}}),
        ("~astuner.rollout.temperature", lambda config: config.astuner.rollout.temperature == 0.9),
        ("~astuner.rollout.top_p", lambda config: config.astuner.rollout.top_p == 1.0),
        ("astuner.trainer_common.total_training_steps=null",
         lambda config: config.astuner.trainer_common.total_training_steps is None),
    ],
)  # fmt: skip
def test_forms_of_hydra(write: Write, minimal: str, override: str, read: Callable[[RunConfig], bool] | None) -> None:
    path = write(minimal + "    temperature: 0.1\n  trainer_common: {total_training_steps: 3}\n")
    if read is None:
        with pytest.raises(ConfigError, match="unknown key"):
            load_config(path, [override])
    else:
        assert read(load_config(path, [override]).config)


def test_the_last_of_two_overrides_holds(write: Write, minimal: str) -> None:
    overrides = ["astuner.rollout.num_repeat=6", "astuner.rollout.num_repeat=7"]
    assert load_config(write(minimal), overrides).config.astuner.rollout.num_repeat == 7


def test_overrides_resolve_references(write: Write, minimal: str) -> None:
    config = load_config(write(minimal), ["astuner.data.train_batch_size=${astuner.rollout.num_repeat}"]).config
    assert config.astuner.data.train_batch_size == 4


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("astuner.rollout.num_repeat", r"'astuner.rollout.num_repeat' has no value; write"),
        ("astuner.rollout.num_repeat=4,8", r"gives several values; write a list as key=\[a,b\]"),
        ("astuner.rolout.num_repeat=4", r"unknown key .*; did you mean 'astuner.rollout.num_repeat'\?"),
        ("+astuner.rollout.more=4", "unknown key 'astuner.rollout.more'"),
        ("num_repeats=4", "unknown key 'num_repeats'; keys of the top level: astuner, verl, trinity"),
        ("lr=4", r"unknown key 'lr'; did you mean 'astuner.trainer_common.optim.lr'\?"),
        ("astuner.rollout={num_repeat: 4, foo: 1}", "unknown key 'astuner.rollout.foo'"),
        ("astuner.task_reader.mixture.0.weight=4", r"task_reader.mixture is a list, .*; write the whole list"),
        ("astuner.rollout.num_repeat.x=4", "astuner.rollout.num_repeat is a single value; there is no key 'x' under"),
        ("astuner.rollout.num_repeat=four", "astuner.rollout.num_repeat is 'four'; expected a whole number"),
        ("astuner.rollout=4", "astuner.rollout is 4; expected a section"),
        ("trinity=abc", "trinity is 'abc'; expected a section with keys below it: write trinity.KEY=VALUE"),
        ("verl=[abc]", r"verl is \['abc'\]; expected a section with keys below it: write verl.KEY=VALUE"),
        ("astuner=abc", "astuner is 'abc'; expected a section with keys below it: write astuner.KEY=VALUE"),
        ("astuner.rollout=[]", r"astuner.rollout is \[\]; expected a section with keys below it$"),
        (
            "astuner.rollout={multi_turn: [1]}",
            r"astuner.rollout.multi_turn is \[1\]; expected a section with keys",
        ),
        ("astuner.trainer_common.logger={}", r"astuner.trainer_common.logger is \{\}; expected a list of console"),
        ("astuner.services=[a]", r"astuner.services is \['a'\]; expected a mapping$"),
        ("astuner.trainer_common.optim.betas=[]", r"optim.betas is \[\]; expected a list of 2 items$"),
        ("~verl.trainer", "Could not delete from config. 'verl.trainer' does not exist."),
        ("hydra.run.dir=x", "hydra.run.dir has no effect; remove it"),
        ("astuner.model.path=${oc.env:ASTUNER_NOT_SET}", "Environment variable 'ASTUNER_NOT_SET' not found"),
    ],
)
def test_a_wrong_override_is_reported(write: Write, minimal: str, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        load_config(write(minimal), [override])
    assert "command line: " in str(raised.value)
    assert "\n  /" not in str(raised.value)


def test_deleting_a_required_key_says_that_it_is_missing(write: Write, minimal: str) -> None:
    path = write(minimal)
    with pytest.raises(ConfigError, match=r"^\S+run\.yaml: the model to train is missing"):
        load_config(path, ["~astuner.model.path"])


def test_search_path_on_the_command_line(write: Write, minimal: str, tmp_path: Path) -> None:
    text = minimal + "defaults: [sizes, _self_]\n"
    path = write(text, {"elsewhere/sizes": "astuner: {data: {train_batch_size: 3}}\n"})
    loaded = load_config(path, [f"hydra.searchpath=['file://{tmp_path}/elsewhere']"])
    assert loaded.config.astuner.data.train_batch_size == 3
