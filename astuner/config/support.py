"""Which keys each backbone can honour: one table of keys that only some use, one of values that some refuse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from astuner.config.keys import dotted, is_changed, parts, schema, value_at
from astuner.config.problems import Problem
from astuner.config.root import BackboneName, RunConfig

_ALL: tuple[BackboneName, ...] = ("debug", "local", "trinity", "verl")
_TRAINING: tuple[BackboneName, ...] = ("local", "trinity", "verl")
_CLUSTER: tuple[BackboneName, ...] = ("trinity", "verl")


@dataclass(frozen=True, slots=True)
class Scope:
    """Keys or sections that only `backbones` use.

    One YAML serves all backbones, so the others set them aside, with a notice.
    """

    backbones: tuple[BackboneName, ...]
    keys: tuple[str, ...]


SCOPES = (
    Scope(
        _CLUSTER,
        (
            "astuner.trainer_common.nnodes",
            "astuner.trainer_common.n_gpus_per_node",
            "astuner.trainer_common.fsdp_config",
            "astuner.trainer_common.ray_address",
            "astuner.trainer_common.ulysses_sequence_parallel_size",
            "astuner.rollout.tensor_model_parallel_size",
        ),
    ),
    Scope(("trinity",), ("astuner.asynchrony", "astuner.rollout.n_vllm_engine", "trinity")),
    Scope(("verl",), ("astuner.rollout.mode", "verl")),
    Scope(
        ("debug",),
        (
            "astuner.debug.api_key_env",
            "astuner.debug.base_url",
            "astuner.debug.base_url_timeout",
            "astuner.debug.debug_max_parallel",
            "astuner.debug.debug_tensor_parallel_size",
            "astuner.debug.debug_vllm_port",
            "astuner.debug.debug_vllm_seed",
            "astuner.debug.debug_vllm_timeout",
            "astuner.debug.served_model",
        ),
    ),
    Scope(
        _TRAINING,
        ("astuner.deadlines.save_checkpoint", "astuner.deadlines.sync_weights", "astuner.deadlines.update"),
    ),
    # Local has its engine in process.
    Scope(("debug", "trinity", "verl"), ("astuner.rollout.gpu_memory_utilization",)),
    # Debug rolls out and does not train.
    Scope(
        _TRAINING,
        (
            "astuner.data.shuffle",
            "astuner.debug.debugger_port",
            "astuner.model.gradient_checkpointing",
            "astuner.model.lora",
            "astuner.rollout.max_env_worker",
            "astuner.trainer_common.algorithm",
            "astuner.trainer_common.kl_loss_coef",
            "astuner.trainer_common.kl_loss_type",
            "astuner.trainer_common.logger",
            "astuner.trainer_common.max_checkpoints_to_keep",
            "astuner.trainer_common.max_tokens_per_micro_batch",
            "astuner.trainer_common.mini_batch_num",
            "astuner.trainer_common.no_signal_patience",
            "astuner.trainer_common.optim",
            "astuner.trainer_common.resume",
            "astuner.trainer_common.save_freq",
            "astuner.trainer_common.seed",
            "astuner.trainer_common.stop_on_no_signal",
            "astuner.trainer_common.test_freq",
            "astuner.trainer_common.total_epochs",
            "astuner.trainer_common.total_training_steps",
            "astuner.trainer_common.use_kl_loss",
            "astuner.trainer_common.val_before_train",
            "astuner.trainer_common.val_pass_n",
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Values that `backbones` cannot honour.

    Attributes:
        key: a key, or a section for all its keys.
        backbones: who refuses.
        values: which values; None for every value but the default.
        why: the reason, and what to do.
    """

    key: str
    backbones: tuple[BackboneName, ...]
    values: tuple[object, ...] | None
    why: str


REFUSALS = (
    Refusal(
        "astuner.rollout.name",
        ("debug",),
        ("sglang",),
        "this backbone samples in process or from a vLLM server; write auto, embedded or vllm",
    ),
    Refusal(
        "astuner.rollout.name",
        ("local",),
        ("vllm", "sglang"),
        "this backbone has its engine in process; write auto or embedded",
    ),
    Refusal(
        "astuner.rollout.name",
        ("trinity",),
        ("embedded", "sglang"),
        "this backbone samples from vLLM (on CUDA) or from a Tinker server (on a CPU or elsewhere); write auto",
    ),
    Refusal(
        "astuner.rollout.name",
        ("verl",),
        ("sglang",),
        "verl 0.9.1 asks for SGLang 0.5.12, that for transformers 5.6.0, and verl excludes 5.6.0, so that no "
        "environment has them; write auto, vllm, or embedded (on a CPU)",
    ),
    Refusal(
        "astuner.rollout.mode",
        ("verl",),
        ("async",),
        "a step's episodes are all sampled with the newest weights, before its update; verl's asynchronous trainers "
        "have loops of their own, where this backbone has astuner's; write sync or remove the line",
    ),
    Refusal(
        "astuner.trainer_common.algorithm.adv_estimator",
        ("verl",),
        ("sft",),
        "verl's trainer of transcripts is another program; use --backbone=local",
    ),
    Refusal(
        "astuner.trainer_common.algorithm.adv_estimator",
        ("trinity",),
        ("sft",),
        "Trinity trains transcripts in a mode of its own, which has no workflow; use --backbone=local",
    ),
    Refusal(
        "astuner.update.pack",
        ("trinity", "verl"),
        ("tree",),
        "its trainer computes whole rows; write auto or leaf (each timeline once) or none (each call)",
    ),
    Refusal(
        "astuner.asynchrony.sync_style",
        ("trinity",),
        ("fixed",),
        "sampler and trainer then count steps apart, and wait for each other for ever once a step gives fewer samples "
        "than expected; write explorer_driven, which with sync_interval: 1 samples each step with the newest weights",
    ),
    Refusal(
        "astuner.trainer_common.algorithm.use_kl_in_reward",
        ("trinity",),
        (True,),
        "advantages are made where episodes end, and the starting model's logprobs come later, in the trainer; "
        "write use_kl_loss: true",
    ),
    Refusal(
        "astuner.trainer_common.optim.lr_scheduler",
        ("trinity",),
        ("linear",),
        "Trinity's trainers know constant and cosine; write one of these",
    ),
    Refusal(
        "astuner.rollout.use_agentscope_protocol",
        _ALL,
        (False,),
        "the older step protocol is no longer offered; remove the line and name a Workflow in agentscope_workflow",
    ),
    Refusal(
        "astuner.rollout.gamma",
        _ALL,
        None,
        "no backbone discounts rewards over steps; write 1.0 or remove the line",
    ),
    Refusal(
        "astuner.context_tracker",
        _ALL,
        None,
        "it belongs to the older step protocol, which is no longer offered; remove the line",
    ),
    Refusal(
        "astuner.trainer_common.algorithm.task_norm_patch",
        _ALL,
        (True,),
        "it is not offered; norm_adv_by_std says whether advantages are divided by the group's deviation",
    ),
    Refusal(
        "astuner.task_reader.type",
        _ALL,
        ("env_service",),
        "tasks from an environment service are not offered yet; use dataset_file or huggingface_dat_repo",
    ),
    Refusal(
        "astuner.task_judge.judge_type",
        _ALL,
        ("rubrics_auto_grader",),
        "learned rubrics are not offered yet; use customized_protocol with a judge_protocol",
    ),
)


def unsupported(config: RunConfig) -> Iterator[Problem]:
    """The values that the configuration's backbone cannot honour."""
    backbone = config.astuner.backbone
    for refusal in REFUSALS:
        if backbone not in refusal.backbones:
            continue
        for key in schema().below(parts(refusal.key)):
            value = value_at(config, key)
            refused = is_changed(config, key) if refusal.values is None else value in refusal.values
            if refused:
                text = f"{dotted(key)} is {value!r}, which --backbone={backbone} cannot honour: {refusal.why}"
                yield Problem(text, keys=(key,))


def set_aside(config: RunConfig) -> Iterator[str]:
    """At most one notice: the keys that were set and that the backbone does not use."""
    backbone = config.astuner.backbone
    others = (name for scope in SCOPES if backbone not in scope.backbones for name in scope.keys)
    unused = [dotted(key) for name in others for key in schema().below(parts(name)) if is_changed(config, key)]
    if unused:
        yield f"not used by {backbone}: {', '.join(unused)}"
