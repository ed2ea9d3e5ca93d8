"""Keys that a backbone ignores with a notice, and values that it does not support."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from astuner.config.corrections import CORRECTIONS
from astuner.config.keys import dotted, parts, schema, value_at
from astuner.config.loading import load_config, notices, unsupported_values
from astuner.config.root import RunConfig
from astuner.errors import ConfigError

Write = Callable[..., Path]

VARIANTS: dict[str, list[Any]] = {
    "astuner.context_tracker.auto_context_cm.base_url": ["http://127.0.0.1:8000/v1"],
    "astuner.rollout.compute_madness_checklist": [["nonsense"]],
    "astuner.rollout.val_kwargs.do_sample": [True],
    "astuner.task_judge.judge_type": ["customized_protocol", "rubrics_auto_grader"],
    "astuner.trainer_common.correction.mode": list(CORRECTIONS),
    "astuner.trainer_common.distillation.teacher": ["self", "a/folder", "http://127.0.0.1:8000/v1"],
}
"""Values of the keys that choose a variant, where no notice names the variant."""


def config_with(key: str, value: object, backbone: str) -> RunConfig:
    tree: dict[str, Any] = {"astuner": {"backbone": backbone}}
    node = tree
    *path, last = key.split(".")
    for part in path:
        node = node.setdefault(part, {})
    node[last] = value
    return RunConfig.model_validate(tree)


def test_rules_that_a_section_excepts_are_rules_of_the_section() -> None:
    for path, key in schema().keys.items():
        declared = [when for rule in key.rules for when in rule.no_effect]
        assert set(key.rules[-1].despite) <= set(declared), path


def test_a_variant_is_a_value_of_the_key_that_chooses_it() -> None:
    for path, rule in schema().declarations.items():
        for variant in rule.variant:
            chosen_by = (*path[:-1], schema().sections[path[:-1]].chosen_by)
            named = variant.otherwise.removeprefix("unless {} is ").strip("`")
            values = list(filter(variant.includes, VARIANTS.get(dotted(chosen_by), [named])))
            assert values
            for value in values:
                assert value_at(config_with(dotted(chosen_by), value, "local"), chosen_by) == value


def test_every_backbone_supports_the_defaults_without_a_notice() -> None:
    for backbone in ("debug", "local", "trinity", "verl"):
        config = RunConfig.model_validate({"astuner": {"backbone": backbone}})
        assert list(unsupported_values(config)) == []
        assert list(notices(config)) == []


@pytest.mark.parametrize(
    ("key", "value", "users"),
    [
        ("astuner.trainer_common.nnodes", 2, {"trinity", "verl"}),
        ("astuner.trainer_common.n_gpus_per_node", 2, {"trinity", "verl"}),
        ("astuner.trainer_common.fsdp_config.param_offload", False, {"trinity", "verl"}),
        ("astuner.trainer_common.ulysses_sequence_parallel_size", 2, {"trinity", "verl"}),
        ("astuner.rollout.tensor_model_parallel_size", 2, {"trinity", "verl"}),
        ("astuner.rollout.n_vllm_engine", 3, {"trinity"}),
        ("astuner.debug.debug_first_n_tasks", 3, {"debug", "local", "trinity", "verl"}),
        ("astuner.asynchrony.sync_interval", 2, {"trinity"}),
        ("astuner.asynchrony.stall_timeout", 5.0, {"trinity"}),
        ("astuner.debug.debug_vllm_port", 2000, {"debug"}),
        ("astuner.debug.debug_tensor_parallel_size", 2, {"debug"}),
        ("astuner.debug.debug_vllm_timeout", 2, {"debug"}),
        ("astuner.rollout.gpu_memory_utilization", 0.3, {"debug", "trinity", "verl"}),
        ("astuner.trainer_common.device", "cpu", {"debug", "local", "trinity", "verl"}),
        ("astuner.debug.base_url", "http://127.0.0.1:8000/v1", {"debug"}),
        ("astuner.update.pack", "none", {"debug", "local", "trinity", "verl"}),
        ("astuner.trainer_common.ray_address", "auto", {"trinity", "verl"}),
        ("astuner.trainer_common.optim.lr", 1.0, {"local", "trinity", "verl"}),
        ("verl", {"x": 1}, {"verl"}),
        ("trinity", {"x": 1}, {"trinity"}),
        ("astuner.rollout.temperature", 0.5, {"debug", "local", "trinity", "verl"}),
    ],
)
def test_keys_of_other_backbones_are_ignored(key: str, value: object, users: set[str]) -> None:
    for backbone in ("debug", "local", "trinity", "verl"):
        config = config_with(key, value, backbone)
        assert list(unsupported_values(config)) == []
        ignored = [notice for notice in notices(config) if notice.startswith("not used")]
        assert ignored == ([] if backbone in users else [f"not used by {backbone}: {key}"])


@pytest.mark.parametrize(
    ("key", "value", "backbones"),
    [
        ("astuner.rollout.name", "sglang", {"trinity", "verl"}),
        ("astuner.rollout.mode", "async", {"verl"}),
        ("astuner.trainer_common.algorithm.adv_estimator", "sft", {"trinity", "verl"}),
        ("astuner.trainer_common.algorithm.use_kl_in_reward", True, {"trinity"}),
        ("astuner.trainer_common.optim.lr_scheduler", "linear", {"trinity"}),
        ("astuner.asynchrony.sync_style", "fixed", {"trinity"}),
        ("astuner.update.pack", "tree", {"trinity"}),
        ("astuner.trainer_common.deterministic", True, {"trinity", "verl"}),
        ("astuner.trainer_common.algorithm.task_norm_patch", True, {"debug", "local", "trinity", "verl"}),
    ],
)
def test_values_that_a_backbone_does_not_support_are_errors(key: str, value: object, backbones: set[str]) -> None:
    for backbone in ("debug", "local", "trinity", "verl"):
        problems = list(unsupported_values(config_with(key, value, backbone)))
        assert len(problems) == (backbone in backbones)
        for problem in problems:
            assert problem.text.startswith(f"{key} is {value!r}, which --backbone={backbone} does not support: ")
            assert problem.keys == (parts(key),)


def test_the_error_has_the_place_where_the_key_was_set(write: Write, minimal: str) -> None:
    path = write(minimal + "    name: sglang\n")
    with pytest.raises(ConfigError, match=r"run\.yaml:5: astuner\.rollout\.name is 'sglang', which --backbone=trin"):
        load_config(path, backbone="trinity")
    assert load_config(path, backbone="local").config.astuner.rollout.name == "sglang"


@pytest.mark.parametrize(
    ("value", "backbone", "notice"),
    [
        ("vllm", "local", "astuner.rollout.name: vllm is ignored: local runs its engine in process"),
        ("sglang", "local", "astuner.rollout.name: sglang is ignored: local runs its engine in process"),
        (
            "sglang",
            "debug",
            "astuner.rollout.name: sglang is ignored: debug samples in process or, with vllm, from a",
        ),
        ("vllm", "trinity", "no effect where a Tinker server samples and trains, as for trinity "),
        ("embedded", "trinity", "no effect where a Tinker server samples and trains, as for trinity "),
        ("embedded", "verl", None),
        ("vllm", "debug", None),
        ("auto", "local", None),
    ],
)
def test_an_engine_of_another_backbone_is_set_aside_with_one_notice(
    write: Write, minimal: str, value: str, backbone: str, notice: str | None
) -> None:
    loaded = load_config(write(f"{minimal}    name: {value}\n"), backbone=backbone)
    about = [text for text in loaded.notices if "rollout.name" in text]
    assert len(about) == (notice is not None)
    assert all(text.startswith(str(notice)) for text in about)


def test_the_embedded_engine_is_set_aside_by_trinity_on_gpus(
    write: Write, minimal: str, install_gpus: Callable[[int], None]
) -> None:
    install_gpus(2)
    loaded = load_config(write(f"{minimal}    name: embedded\n"), backbone="trinity")
    (about,) = [text for text in loaded.notices if "rollout.name" in text]
    assert about == "astuner.rollout.name: embedded is ignored: trinity samples from vLLM or from a Tinker server"


@pytest.mark.parametrize(
    ("gpus", "backbone", "overrides", "noticed"),
    [
        (0, "trinity", [], True),
        (1, "trinity", [], True),
        (8, "trinity", [], False),
        (8, "trinity", ["astuner.model.lora.rank=8"], True),
        (8, "trinity", ["astuner.trainer_common.device=cpu"], True),
        (0, "verl", [], True),
        (8, "verl", [], False),
        (8, "verl", ["astuner.trainer_common.device=cpu"], True),
    ],
)
def test_settings_of_gpus_are_noticed_only_where_they_have_no_effect(
    write: Write,
    minimal: str,
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    backbone: str,
    overrides: list[str],
    noticed: bool,
) -> None:
    monkeypatch.setattr("astuner.config.section.visible_gpus", lambda: gpus)
    offload = "astuner.trainer_common.fsdp_config.param_offload"
    notices = load_config(write(minimal), [f"{offload}=false", *overrides], backbone=backbone).notices
    assert any(offload in notice for notice in notices) == noticed


def test_the_helper_model_of_judges_is_noticed_unless_a_judge_of_the_user_may_ask_it(
    write: Write, minimal: str
) -> None:
    judge = "astuner.task_judge.math_answer_as_judge->MathAnswerAsJudge"
    text = minimal + "  task_judge:\n    alien_llm_model: qwen3-235b-a22b-instruct-2507\n    judge_protocol: "
    (notice,) = load_config(write(text + judge)).notices
    assert notice == "no effect because the judge asks no other model: astuner.task_judge.alien_llm_model"
    assert load_config(write(text + "my_judge->Judge")).notices == ()


def test_one_notice_lists_all_ignored_keys(write: Write, minimal: str) -> None:
    text = minimal + "  trainer_common: {n_gpus_per_node: 1, ray_address: auto}\nverl: {a: 1}\n"
    loaded = load_config(write(text), ["astuner.rollout.tensor_model_parallel_size=2"])
    assert loaded.notices == (
        "not used by local: astuner.rollout.tensor_model_parallel_size, astuner.trainer_common.n_gpus_per_node, "
        "astuner.trainer_common.ray_address, verl",
    )
