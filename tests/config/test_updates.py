"""Changing a configuration from Python."""

from __future__ import annotations

import pytest

from astuner.config.loading import with_values
from astuner.config.root import RunConfig
from astuner.errors import ConfigError


def test_values_are_changed_and_the_rest_stays() -> None:
    before = RunConfig.model_validate({"astuner": {"project_name": "mine"}, "verl": {"a": {"b": 1}}})
    after = with_values(before, {"astuner.trainer_common.optim.lr": 1e-5, "astuner.rollout.name": "embedded"})
    assert after.astuner.trainer_common.optim.lr == 1e-5
    assert after.astuner.rollout.name == "embedded"
    assert (after.astuner.project_name, after.verl) == ("mine", {"a": {"b": 1}})
    assert before.astuner.rollout.name == "auto"


def test_unknown_keys_and_wrong_values_are_reported() -> None:
    with pytest.raises(ConfigError, match=r"^unknown key 'astuner\.rollout\.lr'; did you mean"):
        with_values(RunConfig(), {"astuner.rollout.lr": 1})
    with pytest.raises(ConfigError, match=r"^astuner\.rollout\.num_repeat is 0; expected a number greater than 0$"):
        with_values(RunConfig(), {"astuner.rollout.num_repeat": 0})
