"""The schema as a table of keys."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astuner.config.keys import dotted, nearest_key, parts, schema, value_at
from astuner.config.root import RunConfig


def test_every_key_is_documented_and_has_its_default() -> None:
    for key in schema().keys.values():
        assert key.doc.strip(), key.path
        assert value_at(RunConfig(), key.path) == key.default


def test_free_form_keys_know_what_is_below_them() -> None:
    free = {dotted(key.path) for key in schema().keys.values() if key.free_form}
    of_astuner = {
        *("model.renderer", "rollout.frozen_models", "rollout.players", "services", "workflow.agents", "workflow.env"),
        *(
            "task_reader.options",
            "task_reader.env_service.env_params",
            "task_judge.params",
            "task_judge.rubrics_auto_grader.env_service.env_params",
            "trainer_common.algorithm.component_weights",
        ),
    }
    assert free == {"verl", "trinity", *(f"astuner.{name}" for name in of_astuner)}
    assert schema().knows(("verl", "trainer", "x.y"))
    assert schema().owner(("verl", "trainer")) == ("verl",)
    assert not schema().knows(("astuner", "rollout", "x"))
    assert schema().owner(("astuner", "rollout")) is None


def test_keys_below_a_section() -> None:
    section = "astuner.trainer_common.fsdp_config"
    below = {dotted(key) for key in schema().below(parts(section))}
    assert {f"{section}.param_offload", f"{section}.optimizer_offload"} <= below
    assert below == {name for name in map(dotted, schema().keys) if name.startswith(f"{section}.")}


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("astuner.rollout.num_repeats", "astuner.rollout.num_repeat"),
        ("astuner.rolout", "astuner.rollout"),
        ("astuner.trainer.optim", "astuner.trainer_common.optim"),
        ("astuner.rollout.lr", "astuner.trainer_common.optim.lr"),
        ("trainer_common", "astuner.trainer_common"),
        ("astunr", "astuner"),
        ("astuner.trainer_common.algorithm.adv_estimater", "astuner.trainer_common.algorithm.adv_estimator"),
        ("astuner.val_kwargs.num_repeat", "astuner.rollout.val_kwargs.num_repeat"),
        ("astuner.rubbish", None),
        ("xx", None),
    ],
)
def test_the_nearest_key(written: str, meant: str | None) -> None:
    assert nearest_key(parts(written)) == meant


@given(key=st.sampled_from(sorted(schema().keys)), at=st.integers(0), letter=st.sampled_from("qxz"))
def test_one_wrong_letter_in_the_last_part_finds_the_section_again(key: tuple[str, ...], at: int, letter: str) -> None:
    name = key[-1]
    spot = at % (len(name) + 1)
    near = nearest_key((*key[:-1], name[:spot] + letter + name[spot:]))
    if len(name) > 3:
        assert near is not None
        assert parts(near)[:-1] == key[:-1]
