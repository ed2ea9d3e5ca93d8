"""Keys that must fit together."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from astuner.config.algorithms import ALGORITHMS
from astuner.config.loading import check_config, load_config, with_values
from astuner.errors import ConfigError

Write = Callable[..., Path]
LOOP = ["astuner.rollout.use_agentscope_protocol=false"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["astuner.rollout.max_model_len=4095"],
         r"^command line: astuner\.rollout\.max_response_length_in_one_turn \(4096\) is more than .*\(4095\)"),
        (["astuner.trainer_common.mini_batch_num=129"],
         r"^command line: .*\(129\) is more than the episodes of a step: .* = 128; "),
        (["astuner.trainer_common.mini_batch_num=33", "astuner.trainer_common.mini_batch_by=group"],
         r"^command line: .*\(33\) is more than the groups of a step: .*train_batch_size is 32, .* episode"),
        (["astuner.asynchrony.sync_interval=4", "astuner.asynchrony.max_staleness=2"],
         r"^command line: with .*sync_interval 4, weights are up to 3 steps old, .*max_staleness is 2; lower the"),
        (["astuner.trainer_common.algorithm.overlong_buffer_length=15001"],
         r"^command line: .*overlong_buffer_length \(15001\) is more than .*max_response_length \(15000\)"),
        (["astuner.rollout.num_repeat=1"], r"^command line: grpo compares .* must be at least 2, and it is 1$"),
        (["astuner.rollout.trainable_targets=[]"], r"^command line: rollout\.trainable_targets is empty"),
        (["astuner.rollout.frozen_models={a: {model: m, base_url: x}}"], r"names a model for 'a', which is trained"),
        (["astuner.rollout.trainable_targets=[b]", "astuner.rollout.frozen_models={a: {model: m}}"],
         r"frozen_models\.a has model 'm' and base_url None; write both"),
        (["astuner.rollout.trainable_targets=[b]", "astuner.rollout.frozen_models={a: {api_key: m}}"],
         r"unknown key 'astuner\.rollout\.frozen_models\.a\.api_key'; did you mean '.*\.a\.api_key_env'"),
        (["~astuner.model.path"], r"run\.yaml: the model to train is missing; add `path: .*` under `astuner:`"),
        (["~astuner.rollout.agentscope_workflow"], r"run\.yaml: the workflow to tune is missing; add `agent"),
        (["astuner.rollout.gamma=0.9"], r"gamma is 0\.9, and only the built-in agent loop .*; write 1\.0 or remove"),
        (LOOP, r"run\.yaml.*use_agentscope_protocol is False, .*agentscope_workflow names another agent; remove one"),
        ([*LOOP, "~astuner.rollout.agentscope_workflow", "astuner.workflow.command=[agent]"],
         r"workflow\.command names another agent; remove one"),
        ([*LOOP, "~astuner.rollout.agentscope_workflow", "astuner.task_reader.type=huggingface_dat_repo"],
         r"the tasks of task_reader\.type huggingface_dat_repo have no environment; write `type: env_service`"),
        ([*LOOP, "astuner.rollout.action_form=tool_call", "astuner.rollout.agentscope_disable_toolcalls=true"],
         r"action_form is tool_call, and .*agentscope_disable_toolcalls hides tools"),
        ([*LOOP, "astuner.rollout.step_rewards=returns_to_go", "astuner.task_judge.judge_protocol=a.b->C"],
         r"step_rewards is returns_to_go, .*judge_protocol replaces them with one score; remove one"),
        ([*LOOP, "astuner.rollout.gamma=0.5", "astuner.task_judge.judge_protocol=a.b->C"], r"rollout\.gamma is 0\.5, "),
        ([*LOOP, "astuner.context_tracker.context_tracker_type=auto_context",
          "astuner.context_tracker.max_env_len=17488"], r"max_env_len \(17488\) \+ .* \(512\) is not less than .*"),
        (["astuner.trainer_common.correction={mode: token_tis, old_logprobs: sampler}"],
         r"old_logprobs is sampler, .*mode token_tis would correct for the sampler again; remove old_logprobs"),
        (["astuner.backbone=trinity", "astuner.trainer_common.mini_batch_num=2",
          "astuner.trainer_common.correction=icepop"],
         r"mode icepop needs the trainer's logprobs before the update, .*mini_batch_num 2, trinity updates"),
        (["astuner.backbone=trinity", "astuner.trainer_common.mini_batch_num=2",
          "astuner.trainer_common.correction.old_logprobs=trainer"], r"old_logprobs is trainer, and with .* trinity"),
        (["astuner.trainer_common.correction={mode: icepop, min_weight: 6}"],
         r"min_weight is 6, expected a value below max_weight, which is 5; null is the value of mode icepop"),
        (["astuner.trainer_common.correction={mode: geo_rs, max_rejection: 0.9}"],
         r"min_rejection is 0\.999, expected a value below max_rejection, which is 0\.9"),
        (["astuner.task_reader.type=dataset_file"], r"no file is named; add `file_path: tasks\.jsonl` under"),
    ],
)  # fmt: skip
def test_inconsistent_values_are_reported(write: Write, minimal: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(minimal), overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["astuner.rollout.max_model_len=4096"],
        ["astuner.trainer_common.mini_batch_num=128"],
        ["astuner.rollout.num_repeat=2"],
        ["astuner.backbone=trinity", "astuner.asynchrony.sync_interval=3", "astuner.asynchrony.max_staleness=2"],
        ["astuner.rollout.num_repeat=1", "astuner.trainer_common.algorithm=reinforce++"],
        ["~astuner.rollout.agentscope_workflow", "astuner.trainer_common.algorithm=sft"],
        ["astuner.task_reader.type=dataset_file", "astuner.task_reader.dataset_file.training.file_path=a.jsonl"],
    ],
)
def test_values_at_the_limit_are_accepted(write: Write, minimal: str, overrides: list[str]) -> None:
    assert load_config(write(minimal), overrides).notices == ()


def test_every_group_algorithm_needs_a_group(write: Write, minimal: str) -> None:
    path = write(minimal)
    comparing = [
        name for name, spec in ALGORITHMS.items() if spec.reinforcement and spec.reinforcement.advantage.compares_group
    ]
    assert {"grpo", "dr_grpo", "dapo", "rloo", "gspo", "cispo"} <= set(comparing)
    assert "reinforce++" not in comparing
    config = load_config(path).config
    for algorithm in comparing:
        values = {"rollout.num_repeat": 1, "trainer_common.algorithm.adv_estimator": algorithm}
        alone = with_values(config, {f"astuner.{key}": value for key, value in values.items()})
        with pytest.raises(ConfigError, match=f"{re.escape(algorithm)} compares the episodes of one task"):
            check_config(alone)


@pytest.mark.parametrize(
    ("overrides", "notice"),
    [
        (["trainer_common.use_kl_loss=false", "trainer_common.kl_loss_coef=0.1"],
         "no effect while use_kl_loss is false: astuner.trainer_common.kl_loss_coef"),
        (["trainer_common.algorithm.kl_coef=0.1", "trainer_common.algorithm.kl_penalty=k2"],
         "no effect while algorithm.use_kl_in_reward is false: astuner.trainer_common.algorithm.kl_penalty, "
         "astuner.trainer_common.algorithm.kl_coef"),
        (["model.lora.alpha=8"], "no effect while model.lora.rank is 0: astuner.model.lora.alpha"),
        (["model.lora.rank=4", "model.lora.dropout=0.1"],
         "no effect except for sft: the sampler and the trainer have to agree: astuner.model.lora.dropout"),
        (["trainer_common.kl_loss_coef=0", "trainer_common.kl_loss_type=k1"],
         "no effect while kl_loss_coef is 0: astuner.trainer_common.kl_loss_type"),
        (["trainer_common.algorithm.use_kl_in_reward=true", "trainer_common.algorithm.kl_coef=0",
          "trainer_common.algorithm.kl_penalty=k2"],
         "no effect while algorithm.kl_coef is 0: astuner.trainer_common.algorithm.kl_penalty"),
        (["backbone=trinity", "rollout.n_vllm_engine=3"],
         "no effect where a Tinker server samples and trains, as for trinity with adapters or fewer than two GPUs: "
         "astuner.rollout.n_vllm_engine"),
        (["backbone=trinity", "asynchrony.over_rollout_wait=5"],
         "no effect while asynchrony.over_rollout is 0: astuner.asynchrony.over_rollout_wait"),
        (["trainer_common.optim.min_lr_ratio=0.1"],
         "no effect while optim.lr_scheduler is constant: astuner.trainer_common.optim.min_lr_ratio"),
        (["rollout.compute_madness_checklist=[]", "rollout.agent_madness_reward=-2"],
         "no effect while rollout.compute_madness_checklist is empty: astuner.rollout.agent_madness_reward"),
        (["rollout.top_p=0.8"],
         "rollout.top_p is 0.8: the model samples from a part of its distribution, and a sampled token was more likely "
         "than the trained policy assumes, up to 1.25 times. trainer_common.correction (token_tis) corrects this"),
        (["rollout.top_k=50", "rollout.top_p=0.8", "trainer_common.correction=none"],
         "rollout.top_p is 0.8 and rollout.top_k is 50: the model samples from a part of its distribution, and a "
         "sampled token was more likely than the trained policy assumes, by a factor that depends on the token. "
         "Nothing corrects this, because trainer_common.correction is off; write top_p: 1.0 and top_k: -1 to sample "
         "from the whole distribution"),
        (["rollout.top_k=50", "backbone=verl", "trainer_common.correction=icepop"],
         "rollout.top_k is 50: the model samples from a part of its distribution, and a sampled token was more likely "
         "than the trained policy assumes, by a factor that depends on the token. trainer_common.correction (icepop) "
         "corrects this, except with vLLM, which does not return the probabilities that it sampled with"),
        (["rollout.top_p=0.5", "backbone=trinity"],
         "rollout.top_p is 0.5: the model samples from a part of its distribution, and a sampled token was more likely "
         "than the trained policy assumes, up to 2 times. The engine does not return the probabilities that it sampled "
         "with, so nothing corrects this; write top_p: 1.0 and top_k: -1 to sample from the whole distribution"),
        (["task_judge.timeout=5"], "no effect without a task_judge.judge_protocol: astuner.task_judge.timeout"),
        (["rollout.val_kwargs.temperature=1.0"],
         "no effect while rollout.val_kwargs.do_sample is false (validation is greedy): "
         "astuner.rollout.val_kwargs.temperature"),
        (["task_reader.dataset_file.training.file_path=a.jsonl", "task_reader.type=huggingface_dat_repo"],
         "no effect unless task_reader.type is dataset_file: astuner.task_reader.dataset_file.training.file_path"),
        (["task_judge.rubrics_auto_grader.language=zh"],
         "no effect unless task_judge.judge_type is rubrics_auto_grader: "
         "astuner.task_judge.rubrics_auto_grader.language"),
        (["task_judge.alien_llm_response_length=5"],
         "no effect because the judge asks no other model: astuner.task_judge.alien_llm_response_length"),
    ],
)  # fmt: skip
def test_keys_that_mean_nothing_beside_another_are_noticed(
    write: Write, minimal: str, overrides: list[str], notice: str
) -> None:
    assert load_config(write(minimal), [f"astuner.{line}" for line in overrides]).notices == (notice,)


def test_sft_names_the_keys_that_only_rollouts_use(write: Write, minimal: str) -> None:
    overrides = ["trainer_common.algorithm=sft", "rollout.num_repeat=1", "rollout.max_model_len=50"]
    (notice,) = load_config(write(minimal), [f"astuner.{line}" for line in overrides]).notices
    assert notice.startswith("no effect for sft: ")
    assert "astuner.rollout.num_repeat" in notice
    assert "max_model_len" not in notice


@pytest.mark.parametrize(
    ("algorithm", "key", "value"),
    [
        ("sft", "clip_ratio_low", "0.2"),
        ("sft", "clip_ratio_high", "0.2"),
        ("sft", "norm_adv_by_std", "false"),
        ("sft", "use_kl_in_reward", "true"),
        ("sft", "overlong_buffer_length", "5"),
        ("grpo", "prompt_loss_weight", "0.1"),
        ("rloo", "clip_ratio_low", "0.2"),
        ("rloo", "clip_ratio_high", "0.2"),
    ],
)
def test_a_key_that_the_algorithm_has_no_use_for_is_rejected(
    write: Write, minimal: str, algorithm: str, key: str, value: str
) -> None:
    prefix = "astuner.trainer_common.algorithm"
    message = rf"^command line: {prefix}\.{key} is .*, and algorithm {algorithm} has no use for it: .*Remove the key"
    with pytest.raises(ConfigError, match=message):
        load_config(write(minimal), [f"{prefix}={algorithm}", f"{prefix}.{key}={value}"])
