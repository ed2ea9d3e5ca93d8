"""Every alias of the table: read as its canonical name, with one notice; a clash is an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from astuner.config.canonical import ALIASES, Alias, canonical_file
from astuner.config.keys import parts, schema, value_at
from astuner.config.loading import LoadedConfig, load_config
from astuner.config.root import WITHOUT_EFFECT, RunConfig
from astuner.config.yaml_file import read_yaml
from astuner.errors import ConfigError

Write = Callable[..., Path]
MODEL = "  model: {path: m}\n"
START = f"astuner:\n{MODEL}  rollout: {{agentscope_workflow: a->B}}\n"

# For every alias: a file that uses it, the key it is about, and the value that must arrive there.
USES = {
    "astune": (f"astune:\n{MODEL}  rollout: {{agentscope_workflow: a->B}}\n", "astuner.model.path", "m"),
    "ajet": (f"ajet:\n{MODEL}  rollout: {{agentscope_workflow: a->B}}\n", "astuner.model.path", "m"),
    "astuner.rollout.agentscope_learn_protocol": (
        f"astuner:\n{MODEL}  rollout: {{agentscope_learn_protocol: x->Y}}\n",
        "astuner.rollout.agentscope_workflow",
        "x->Y",
    ),
    "astuner.trainer_common.trinity_only__n_vllm_engine": (
        f"{START}  trainer_common: {{trinity_only__n_vllm_engine: 7}}\n",
        "astuner.rollout.n_vllm_engine",
        7,
    ),
    "astuner.task_reader.env_service.env": (
        f"{START}  task_reader: {{type: env_service, env_service: {{env: reasoning_gym/chain_sum}}}}\n",
        "astuner.task_reader.env_service.env_type",
        "reasoning_gym/chain_sum",
    ),
    "astuner.trainer_common.algorithm": (
        f"{START}  trainer_common: {{algorithm: rloo}}\n",
        "astuner.trainer_common.algorithm.adv_estimator",
        "rloo",
    ),
    "astuner.trainer_common.correction": (
        f"{START}  trainer_common: {{correction: icepop}}\n",
        "astuner.trainer_common.correction.mode",
        "icepop",
    ),
    "customized_protocal": (
        f"{START}  task_judge: {{judge_type: customized_protocal}}\n",
        "astuner.task_judge.judge_type",
        "customized_protocol",
    ),
    "hf": (f"{START}  task_reader: {{type: hf}}\n", "astuner.task_reader.type", "huggingface_dat_repo"),
    "tracing": (f"{START}  task_reader: {{type: tracing}}\n", "astuner.task_reader.type", "feedback_tracing"),
    "astune.task_judge.": (
        f"{START}  task_judge: {{judge_protocol: astune.task_judge.x->Y}}\n",
        "astuner.task_judge.judge_protocol",
        "astuner.task_judge.x->Y",
    ),
    "ajet.task_judge.": (
        f"{START}  task_judge: {{judge_protocol: ajet.task_judge.x->Y}}\n",
        "astuner.task_judge.judge_protocol",
        "astuner.task_judge.x->Y",
    ),
    "astune_default": (f"{START}defaults: [astune_default, _self_]\n", "astuner.model.path", "m"),
    "ajet_default": (f"{START}defaults: [ajet_default, _self_]\n", "astuner.model.path", "m"),
    "default": (f"{START}defaults: [default, trinity_default, _self_]\n", "astuner.model.path", "m"),
}


def test_there_is_a_use_for_every_alias_and_every_target_exists() -> None:
    assert USES.keys() == {alias.old for alias in ALIASES}
    for alias in ALIASES:
        if alias.kind != "file":
            assert schema().knows(parts(alias.key or alias.new)), alias


@pytest.mark.parametrize("alias", ALIASES, ids=lambda alias: alias.old)
def test_alias_is_read_as_its_canonical_name(write: Write, alias: Alias) -> None:
    text, key, value = USES[alias.old]
    loaded = load_config(write(text), backbone="trinity")
    assert value_at(loaded.config, parts(key)) == value
    if alias.kind in ("section", "key", "value", "module"):
        (notice,) = (message for message in loaded.notices if " is read as " in message)
        assert alias.old in notice
        assert alias.new in notice
        assert "run.yaml:" in notice
    else:  # a bare algorithm or correction and the older names of defaults are today's spelling as much as any
        assert loaded.notices == ()


@pytest.mark.parametrize("old", ["astune", "ajet"])
def test_section_aliases_hold_inside_references_and_beside_the_canonical_section(write: Write, old: str) -> None:
    text = f"{START}{old}:\n  data: {{train_batch_size: 5, max_prompt_length: '${{{old}.data.train_batch_size}}'}}\n"
    loaded = load_config(write(text))
    assert loaded.config.astuner.data.max_prompt_length == 5
    assert loaded.config.astuner.model.path == "m"


def test_aliases_inside_an_aliased_section(write: Write) -> None:
    loaded = load_config(write(f"ajet:\n{MODEL}  rollout:\n    agentscope_learn_protocol: x->Y\n"))
    assert loaded.config.astuner.rollout.agentscope_workflow == "x->Y"
    assert [notice.split(": ")[0].rsplit(":", 1)[1] for notice in loaded.notices] == ["1", "4"]


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("ajet.rollout.num_repeat=9", "astuner.rollout.num_repeat"),
        ("astune.rollout.num_repeat=9", "astuner.rollout.num_repeat"),
        ("astuner.trainer_common.trinity_only__n_vllm_engine=9", "astuner.rollout.n_vllm_engine"),
        ("+verl.trainer.x=9", "verl"),
    ],
)
def test_key_aliases_on_the_command_line(write: Write, written: str, canonical: str) -> None:
    loaded = load_config(write(START), [written], backbone="trinity")
    assert value_at(loaded.config, parts(canonical)) in (9, {"trainer": {"x": 9}})
    assert len([message for message in loaded.notices if not message.startswith("no effect")]) == 1


def test_value_aliases_on_the_command_line(write: Write) -> None:
    loaded = load_config(write(START), ["astuner.task_judge.judge_type=customized_protocal"])
    assert loaded.config.astuner.task_judge.judge_type == "customized_protocol"
    assert loaded.notices[0].startswith("command line: astuner.task_judge.judge_type: 'customized_protocal'")


def test_a_bare_algorithm_on_the_command_line(write: Write) -> None:
    path = write(START + "  trainer_common: {algorithm: {clip_ratio_low: 0.1}}\n")
    algorithm = load_config(path, ["ajet.trainer_common.algorithm=dapo"]).config.astuner.trainer_common.algorithm
    assert (algorithm.adv_estimator, algorithm.clip_ratio_low) == ("dapo", 0.1)


def test_alias_beside_its_canonical_key_with_another_value_is_an_error(write: Write) -> None:
    path = write(f"astuner:\n{MODEL}  rollout:\n    agentscope_workflow: a->B\n    agentscope_learn_protocol: a->C\n")
    with pytest.raises(ConfigError) as raised:
        load_config(path)
    assert str(raised.value) == (
        f"{path}:5: astuner.rollout.agentscope_learn_protocol is another name of astuner.rollout.agentscope_workflow, "
        "which line 4 sets to another value; keep one of them"
    )


def test_two_sections_of_one_meaning_clash_key_by_key(write: Write) -> None:
    path = write(
        f"{START}  data: {{train_batch_size: 4}}\najet:\n  data:\n    train_batch_size: 8\n    shuffle: false\n"
    )
    with pytest.raises(ConfigError, match=r"run\.yaml:7: ajet\.data\.train_batch_size is another name of .* line 4 "):
        load_config(path)


def test_alias_beside_its_canonical_key_with_the_same_value_is_fine(write: Write) -> None:
    path = write(f"astuner:\n{MODEL}  rollout: {{agentscope_workflow: a->B, agentscope_learn_protocol: a->B}}\n")
    assert load_config(path).config.astuner.rollout.agentscope_workflow == "a->B"


def test_a_later_layer_goes_before_an_alias_in_an_earlier_one(write: Write) -> None:
    path = write(f"astuner:\n{MODEL}  rollout: {{agentscope_learn_protocol: a->B}}\n")
    loaded: LoadedConfig = load_config(path, ["astuner.rollout.agentscope_workflow=a->C"])
    assert loaded.config.astuner.rollout.agentscope_workflow == "a->C"


@pytest.mark.parametrize("key", WITHOUT_EFFECT)
def test_keys_without_effect_are_accepted_with_a_notice(write: Write, key: str) -> None:
    value = {"execute_test": "True", "execute_testing_lambda": "abc"}[key.split(".")[1]]
    loaded = load_config(write(f"{START}  {key.split('.')[1]}: {value}\n"))
    assert [notice.split(": ", 1)[1] for notice in loaded.notices] == [
        f"{key} is accepted for older files and has no effect"
    ]


def test_a_users_own_file_goes_before_an_older_name_of_a_default(write: Write) -> None:
    path = write(f"{START}defaults: [default, _self_]\n", {"default": "astuner: {data: {train_batch_size: 3}}\n"})
    assert load_config(path).config.astuner.data.train_batch_size == 3


def test_rewriting_leaves_the_file_as_it_was_read(write: Write) -> None:
    file = read_yaml(write("ajet:\n  trainer_common: {algorithm: sft}\n"))
    canonical = canonical_file(file)
    assert file.tree == {"ajet": {"trainer_common": {"algorithm": "sft"}}}
    assert canonical.tree == {"astuner": {"trainer_common": {"algorithm": {"adv_estimator": "sft"}}}}
    assert canonical.lines[("astuner", "trainer_common", "algorithm", "adv_estimator")] == 2


def test_a_file_in_todays_spelling_is_not_changed(write: Write) -> None:
    file = read_yaml(write(START))
    assert canonical_file(file).tree == file.tree
    assert canonical_file(file).notices == {}
    assert RunConfig.model_validate(file.tree).astuner.model.path == "m"
