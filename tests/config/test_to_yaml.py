"""A configuration written as YAML loads back to the same configuration."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import AfterValidator
from pydantic.fields import FieldInfo

from astuner.config.keys import KeyPath, schema
from astuner.config.loading import load_config
from astuner.config.root import RunConfig
from astuner.config.section import Section
from astuner.config.yaml_file import to_yaml
from astuner.errors import ConfigError
from tests.examples import examples

# Surrogates cannot be written as UTF-8; `???` means a missing value in Hydra (tested below).
texts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.sampled_from(
        [
            "1e-6",
            "yes",
            "null",
            "2024-01-01",
            "${x}",
            r"\${x}",
            r"\\${x",
            "a: b",
            " # c",
            "1:30",
            "<<",
            "->",
            "\x85",
            "\u2028 ",
            "\ufeff",
            "nan",
            "e5",
            "~",
        ]
    ),
).filter(lambda text: text != "???")
trees = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(texts, inner, max_size=2)),
    max_leaves=4,
)


def values(annotation: Any, metadata: list[Any]) -> st.SearchStrategy[Any]:
    """Values of a field's type within its bounds."""
    bounds: dict[str, Any] = {}
    checks = []
    for item in metadata:
        for constraint in item.metadata if isinstance(item, FieldInfo) else (item,):
            for name in ("gt", "ge", "lt", "le"):
                if isinstance(constraint, annotated_types.BaseMetadata) and hasattr(constraint, name):
                    bounds[name] = getattr(constraint, name)
            if isinstance(constraint, AfterValidator):
                checks.append(constraint.func)
    strategy = plain_values(annotation, bounds)
    return strategy.filter(lambda value: all(accepts(check, value) for check in checks)) if checks else strategy


def accepts(check: Any, value: object) -> bool:
    try:
        check(value)
    except ValueError:
        return False
    return True


def plain_values(annotation: Any, bounds: dict[str, Any]) -> st.SearchStrategy[Any]:
    origin, inner = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return section_values(annotation)
    if origin is Annotated:
        return values(inner[0], list(inner[1:]))
    if origin in (types.UnionType, Union):
        return st.one_of(*(plain_values(kind, bounds) for kind in inner))
    if origin is Literal:
        return st.sampled_from(inner)
    if origin is list:
        return st.lists(values(inner[0], []), max_size=3)
    if origin is tuple:
        return st.tuples(*(values(kind, []) for kind in inner))
    if origin is dict:
        has_bounds = get_origin(inner[1]) is Annotated
        return st.dictionaries(texts, values(inner[1], []) if has_bounds else trees, max_size=3)
    if annotation is int:
        low, high = bounds.get("ge", bounds.get("gt", -1001) + 1), bounds.get("le", 10**7)
        return st.integers(low, high)
    if annotation is float:
        return st.floats(
            bounds.get("ge", bounds.get("gt", -1e9)),
            bounds.get("le", bounds.get("lt", 1e9)),
            exclude_min="gt" in bounds,
            exclude_max="lt" in bounds,
        )
    return {bool: st.booleans(), str: texts, type(None): st.none()}[annotation]


def section_values(section: type[Section]) -> st.SearchStrategy[dict[str, Any]]:
    fields = {name: values(field.annotation, field.metadata) for name, field in section.model_fields.items()}
    required = {
        name: fields.pop(name).filter(bool) for name, field in section.model_fields.items() if field.is_required()
    }
    return st.fixed_dictionaries(required, optional=fields)


def made_valid(tree: dict[str, Any]) -> RunConfig:
    """Remove the contradictions and unsupported values of random choices."""
    run = tree.setdefault("astuner", {})
    rollout, trainer = run.setdefault("rollout", {}), run.setdefault("trainer_common", {})
    model = run.setdefault("model", {})
    model["path"] = model.get("path") or "some/model"
    reader = run.setdefault("task_reader", {})
    reader["type"] = "huggingface_dat_repo"
    reader["random_dummy"] = {"max_words": 100_000}
    reader["mixture"] = [{"type": "a->B", "options": {"${x}": ["???x", 1]}}]
    reader["filters"] = [{"type": "regex", "pattern": "${x}|1e-6"}, {"type": "difficulty", "max": 0.5}]
    run.setdefault("task_judge", {})["judge_type"] = "customized_protocol"
    run["task_judge"]["rubrics_auto_grader"] = {"max_score": 10, "custom_evaluation_prompt": "${x} {rubrics}"}
    run.pop("context_tracker", None)
    run.get("asynchrony", {}).pop("sync_interval", None)
    trainer["mini_batch_num"] = 1
    trainer.update(n_gpus_per_node=None, nnodes=1)
    trainer["distillation"] = {"hint": "${x} {answer}", "coef": 0.5}
    trainer["correction"] = {"mode": "icepop", "min_weight": 0.25, "max_weight": 1e3}
    algorithm = trainer.setdefault("algorithm", {})
    algorithm["task_norm_patch"] = False
    algorithm.pop("prompt_loss_weight", None)
    algorithm.pop("overlong_buffer_length", None)
    algorithm.pop("clip_ratio_dual", None)
    algorithm.pop("dynamic_sampling", None)
    if algorithm.get("adv_estimator") in ("sft", "rloo", "opo", "sapo", "maxrl"):
        algorithm["adv_estimator"] = "gspo"
    run["workflow"] = {"files": ["a b", "${x}"], "env": {"A": "{b}"}, "agents": {"a.b": "${x}: y"}}
    rollout["agentscope_workflow"] = rollout.get("agentscope_workflow") or "flow->Flow"
    rollout.update(use_agentscope_protocol=True, gamma=1.0, step_rewards="sum", name="auto")
    rollout.update(trainable_targets=None, frozen_models={}, players={})
    run["services"] = {"env": {"command": ["a b", "${x}"], "env": {"A": "1"}, "restart": 2}}
    rollout["num_repeat"] = min(max(2, rollout.get("num_repeat", 2)), 10)
    rollout["max_model_len"] = max(
        rollout.get("max_model_len", 1), rollout.get("max_response_length_in_one_turn", 4096)
    )
    for path, rule in schema().declarations.items():
        if any(run.get("backbone", "local") in declared.by for declared in rule.unsupported):
            remove(tree, path)
    return RunConfig.model_validate(tree)


def remove(tree: dict[str, Any], path: KeyPath) -> None:
    """Take a key out of a tree, if it is there."""
    for part in path[:-1]:
        tree = tree.get(part) or {}
    tree.pop(path[-1], None)


@settings(max_examples=examples(12), deadline=None, suppress_health_check=list(HealthCheck))
@given(tree=section_values(RunConfig))
def test_a_written_configuration_loads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, tree: dict[str, Any]
) -> None:
    config = made_valid(tree)
    path = tmp_path_factory.mktemp("round_trip") / "run.yaml"
    for full in (True, False):
        path.write_text(to_yaml(config, full=full), encoding="utf-8")
        assert load_config(path).config == config


@pytest.mark.parametrize(
    "text", [r"\\\${x}", r"a\${x}\\${y}", "${", r"C:\dir\${x", "1e-6", "'", '"${x}"', "a\nb", "é→π"]
)
def test_text_that_looks_like_something_else(tmp_path: Path, minimal: str, text: str) -> None:
    config = RunConfig.model_validate(
        {"astuner": {"project_name": text, "model": {"path": "m"}, "rollout": {"agentscope_workflow": "a->B"}}}
    )
    path = tmp_path / "run.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert load_config(path).config.astuner.project_name == text


def test_every_key_is_written() -> None:
    text = to_yaml(RunConfig())
    assert "adv_estimator: grpo" in text
    assert "  debug:\n" in text


def test_the_text_that_stands_for_a_missing_value_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"a value is '\?\?\?', which means a missing value in YAML"):
        to_yaml(RunConfig.model_validate({"verl": {"a": ["???"]}}))
