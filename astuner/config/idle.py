"""Notices about keys that were set and mean nothing beside the value of another key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from astuner.config.keys import dotted, is_changed, parts, schema
from astuner.config.root import AstunerConfig, RunConfig, starts_vllm


@dataclass(frozen=True, slots=True)
class _Idle:
    """Keys or sections without effect `when` something `holds`, all `but` some; relative to `astuner`."""

    keys: tuple[str, ...]
    when: str
    holds: Callable[[AstunerConfig], bool]
    but: tuple[str, ...] = ()


def _is_sft(run: AstunerConfig) -> bool:
    return run.trainer_common.algorithm.adv_estimator == "sft"


_TABLE = (
    _Idle(
        ("trainer_common.kl_loss_coef", "trainer_common.kl_loss_type"),
        "while use_kl_loss is false",
        lambda run: not run.trainer_common.use_kl_loss and not _is_sft(run),
    ),
    _Idle(
        ("trainer_common.algorithm.kl_coef", "trainer_common.algorithm.kl_penalty"),
        "while algorithm.use_kl_in_reward is false",
        lambda run: not run.trainer_common.algorithm.use_kl_in_reward and not _is_sft(run),
    ),
    _Idle(
        (
            "rollout",
            "task_judge",
            "trainer_common.algorithm.kl_coef",
            "trainer_common.algorithm.kl_penalty",
            "trainer_common.kl_loss_coef",
            "trainer_common.kl_loss_type",
            "trainer_common.mini_batch_num",
            "trainer_common.no_signal_patience",
            "trainer_common.stop_on_no_signal",
            "trainer_common.val_before_train",
            "trainer_common.val_pass_n",
            "data.max_prompt_length",
            "deadlines.rollout",
            "deadlines.sync_weights",
        ),
        "for sft",
        _is_sft,
        but=("rollout.max_model_len",),
    ),
    _Idle(
        ("rollout.val_kwargs.temperature", "rollout.val_kwargs.top_p", "rollout.val_kwargs.top_k"),
        "while rollout.val_kwargs.do_sample is false (validation is greedy)",
        lambda run: not run.rollout.val_kwargs.do_sample and not _is_sft(run),
    ),
    _Idle(
        ("model.lora.alpha", "model.lora.dropout", "model.lora.target_modules"),
        "while model.lora.rank is 0",
        lambda run: run.model.lora.rank == 0,
    ),
    _Idle(
        ("model.lora.dropout",),
        "except for sft: the sampler and the trainer have to agree",
        lambda run: run.model.lora.rank > 0 and not _is_sft(run),
    ),
    _Idle(
        ("trainer_common.kl_loss_type",),
        "while kl_loss_coef is 0",
        lambda run: run.trainer_common.use_kl_loss and run.trainer_common.kl_loss_coef == 0 and not _is_sft(run),
    ),
    _Idle(
        ("trainer_common.algorithm.kl_penalty",),
        "while algorithm.kl_coef is 0",
        lambda run: run.trainer_common.algorithm.use_kl_in_reward and run.trainer_common.algorithm.kl_coef == 0,
    ),
    _Idle(
        (
            "model.gradient_checkpointing",
            "rollout.gpu_memory_utilization",
            "rollout.max_num_seqs",
            "rollout.n_vllm_engine",
            "rollout.tensor_model_parallel_size",
            "trainer_common.fsdp_config",
            "trainer_common.max_tokens_per_micro_batch",
            "trainer_common.n_gpus_per_node",
            "trainer_common.nnodes",
            "trainer_common.ulysses_sequence_parallel_size",
        ),
        "where a Tinker server samples and trains, as for trinity with fewer than two GPUs",
        lambda run: run.backbone == "trinity" and run.trainer_common.device != "cuda",
    ),
    _Idle(
        ("asynchrony.over_rollout_wait",),
        "while asynchrony.over_rollout is 0",
        lambda run: run.backbone == "trinity" and run.asynchrony.over_rollout == 0,
    ),
    _Idle(
        ("trainer_common.optim.min_lr_ratio",),
        "while optim.lr_scheduler is constant",
        lambda run: run.trainer_common.optim.lr_scheduler == "constant",
    ),
    _Idle(
        ("rollout.agent_madness_reward", "rollout.agent_madness_termination"),
        "while rollout.compute_madness_checklist is empty",
        lambda run: not run.rollout.compute_madness_checklist and not _is_sft(run),
    ),
    _Idle(
        ("task_judge.timeout",),
        "without a task_judge.judge_protocol",
        lambda run: not run.task_judge.judge_protocol and not _is_sft(run),
    ),
    _Idle(
        ("model.dtype", "rollout.max_num_seqs", "trainer_common.device"),
        "while debug.base_url names a server that samples",
        lambda run: run.backbone == "debug" and bool(run.debug.base_url),
    ),
    _Idle(
        (
            "debug.debug_tensor_parallel_size",
            "debug.debug_vllm_port",
            "debug.debug_vllm_timeout",
            "rollout.gpu_memory_utilization",
        ),
        "unless rollout.name is vllm, and no debug.base_url names a server that runs",
        lambda run: run.backbone == "debug" and not starts_vllm(run),
    ),
    _Idle(
        ("debug.api_key_env", "debug.base_url_timeout", "debug.served_model"),
        "without a debug.base_url",
        lambda run: run.backbone == "debug" and not run.debug.base_url,
    ),
    _Idle(
        ("task_reader.dataset_file",),
        "unless task_reader.type is dataset_file",
        lambda run: run.task_reader.type != "dataset_file",
    ),
    _Idle(
        ("task_reader.huggingface_dat_repo",),
        "unless task_reader.type is huggingface_dat_repo",
        lambda run: run.task_reader.type != "huggingface_dat_repo",
    ),
    _Idle(
        ("task_reader.env_service",),
        "unless task_reader.type is env_service",
        lambda run: run.task_reader.type != "env_service",
    ),
    _Idle(
        ("task_judge.rubrics_auto_grader",),
        "unless task_judge.judge_type is rubrics_auto_grader",
        lambda run: run.task_judge.judge_type != "rubrics_auto_grader" and not _is_sft(run),
    ),
    _Idle(
        ("task_judge.alien_llm_model", "task_judge.alien_llm_response_length"),
        "as no judge of this version asks another model",
        lambda run: not _is_sft(run),
    ),
)


def without_effect(config: RunConfig) -> Iterator[str]:
    """The notices, one for each reason."""
    for idle in _TABLE:
        if idle.holds(config.astuner):
            keys = (key for name in idle.keys for key in schema().below(parts(f"astuner.{name}")))
            used = {parts(f"astuner.{name}") for name in idle.but}
            changed = [dotted(key) for key in keys if key not in used and is_changed(config, key)]
            if changed:
                yield f"no effect {idle.when}: {', '.join(changed)}"
