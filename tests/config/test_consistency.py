"""Keys that must fit together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from astuner.config.consistency import GROUP_ALGORITHMS
from astuner.config.loading import load_config
from astuner.errors import ConfigError

Write = Callable[..., Path]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["astuner.rollout.max_model_len=4095"],
         r"^command line: astuner\.rollout\.max_response_length_in_one_turn \(4096\) is more than .*\(4095\)"),
        (["astuner.trainer_common.mini_batch_num=129"], r"^command line: .*\(129\) is more than a step has .* = 128$"),
        (["astuner.rollout.num_repeat=1"], r"^command line: grpo compares .* must be at least 2, and it is 1$"),
        (["~astuner.model.path"], r"run\.yaml: the model to train is missing; add `path: .*` under `astuner:`"),
        (["~astuner.rollout.agentscope_workflow"], r"run\.yaml: the workflow to tune is missing; add `agent"),
        (["astuner.task_reader.type=dataset_file"], r"no file is named; add `file_path: tasks\.jsonl` under"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said(write: Write, minimal: str, overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(write(minimal), overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["astuner.rollout.max_model_len=4096"],
        ["astuner.trainer_common.mini_batch_num=128"],
        ["astuner.rollout.num_repeat=2"],
        ["astuner.rollout.num_repeat=1", "astuner.trainer_common.algorithm=reinforce++"],
        ["astuner.rollout.num_repeat=1", "astuner.trainer_common.algorithm=sft"],
        ["~astuner.rollout.agentscope_workflow", "astuner.trainer_common.algorithm=sft"],
        ["astuner.task_reader.type=dataset_file", "astuner.task_reader.dataset_file.training.file_path=a.jsonl"],
    ],
)
def test_what_just_fits_loads(write: Write, minimal: str, overrides: list[str]) -> None:
    assert load_config(write(minimal), overrides).notices == ()


def test_every_group_algorithm_needs_a_group(write: Write, minimal: str) -> None:
    path = write(minimal)
    for algorithm in GROUP_ALGORITHMS:
        overrides = ["astuner.rollout.num_repeat=1", f"astuner.trainer_common.algorithm={algorithm}"]
        with pytest.raises(ConfigError, match=f"{algorithm} compares the episodes of one task"):
            load_config(path, overrides)


@pytest.mark.parametrize(
    ("overrides", "notice"),
    [
        (["trainer_common.use_kl_loss=false", "trainer_common.kl_loss_coef=0.1"],
         "no effect while use_kl_loss is false: astuner.trainer_common.kl_loss_coef"),
        (["trainer_common.algorithm.kl_coef=0.1", "trainer_common.algorithm.kl_penalty=k2"],
         "no effect while algorithm.use_kl_in_reward is false: astuner.trainer_common.algorithm.kl_coef, "
         "astuner.trainer_common.algorithm.kl_penalty"),
        (["trainer_common.algorithm=sft", "trainer_common.algorithm.clip_ratio_low=0.1"],
         "no effect for sft: astuner.trainer_common.algorithm.clip_ratio_low"),
        (["trainer_common.algorithm.prompt_loss_weight=0.1"],
         "no effect except for sft: astuner.trainer_common.algorithm.prompt_loss_weight"),
    ],
)  # fmt: skip
def test_keys_that_mean_nothing_beside_another_are_noticed(
    write: Write, minimal: str, overrides: list[str], notice: str
) -> None:
    assert load_config(write(minimal), [f"astuner.{line}" for line in overrides]).notices == (notice,)
