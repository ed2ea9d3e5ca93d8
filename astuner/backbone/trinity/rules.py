"""Values of Trinity's configuration that are no plain copies of one key of astuner; mapping.yaml names them.

The first line of a rule's docstring is what the documentation says of it. A step of Trinity's trainer is one optimiser
step, of which a training step of astuner's has `trainer_common.mini_batch_num`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from astuner.backbone.step_credit import uses_kl_loss
from astuner.backbone.trinity.plan import TrinityPlan
from astuner.config.root import AstunerConfig

Rule = Callable[[AstunerConfig, TrinityPlan], object]

_OF_THE_LOSS = {"adv_estimator", "clip_ratio_low", "clip_ratio_high", "loss_agg_mode", "norm_adv_by_std"}
# Of machines in a cluster, which this one may not be alike.
_USUAL_GPUS = 8
GPUS_PER_NODE = "astuner.trainer_common.n_gpus_per_node"


def mode(config: AstunerConfig, plan: TrinityPlan) -> str:
    """both to train, bench for a dry run."""
    return plan.mode


def checkpoint_root_dir(config: AstunerConfig, plan: TrinityPlan) -> str:
    """A folder in the run record."""
    return str(plan.checkpoint_root_dir)


def namespace(config: AstunerConfig, plan: TrinityPlan) -> str:
    """The run's own."""
    return plan.namespace


def model_path(config: AstunerConfig, plan: TrinityPlan) -> str:
    """The model's folder or Hugging Face name."""
    return plan.model_path


def max_model_len(config: AstunerConfig, plan: TrinityPlan) -> int:
    """At most what the model has positions for."""
    return plan.max_model_len


def uses_tinker(config: AstunerConfig, plan: TrinityPlan) -> bool:
    """Whether a Tinker service samples and trains."""
    return plan.uses_tinker


def tinker_base_url(config: AstunerConfig, plan: TrinityPlan) -> str | None:
    """The service's address."""
    return plan.tinker_base_url


def engine_type(config: AstunerConfig, plan: TrinityPlan) -> str:
    """tinker or vllm."""
    return "tinker" if plan.uses_tinker else "vllm"


def trainer_type(config: AstunerConfig, plan: TrinityPlan) -> str:
    """tinker or verl."""
    return "tinker" if plan.uses_tinker else "verl"


def runners(config: AstunerConfig, plan: TrinityPlan) -> int:
    """Processes that run episodes, for each engine."""
    return plan.runners


def total_steps(config: AstunerConfig, plan: TrinityPlan) -> int:
    """All training steps of the run."""
    return plan.total_steps


def updates(config: AstunerConfig, plan: TrinityPlan) -> int:
    """All training steps of the run × mini_batch_num."""
    return plan.total_steps * config.trainer_common.mini_batch_num


def updates_between_checkpoints(config: AstunerConfig, plan: TrinityPlan) -> int:
    """save_freq × mini_batch_num."""
    return config.trainer_common.save_freq * config.trainer_common.mini_batch_num


def updates_between_syncs(config: AstunerConfig, plan: TrinityPlan) -> int:
    """sync_interval × mini_batch_num."""
    return config.asynchrony.sync_interval * config.trainer_common.mini_batch_num


def warmup_updates(config: AstunerConfig, plan: TrinityPlan) -> int:
    """lr_warmup_steps × mini_batch_num."""
    return config.trainer_common.optim.lr_warmup_steps * config.trainer_common.mini_batch_num


def episodes(config: AstunerConfig, plan: TrinityPlan) -> int:
    """train_batch_size × num_repeat; for Trinity's log only, a step trains all samples of its episodes."""
    return config.data.train_batch_size * config.rollout.num_repeat


def requested_tasks(config: AstunerConfig, plan: TrinityPlan) -> list[dict[str, str]]:
    """The tasks that astuner asks to have validated; none for fully_async, which Trinity does not let validate."""
    if config.asynchrony.sync_style == "fully_async":
        return []
    here = "astuner.backbone.trinity"
    return [
        {
            "name": "request",
            "path": "astuner",
            "storage_type": f"{here}.reader.RequestReader",
            "default_workflow_type": f"{here}.workflow.EpisodeWorkflow",
        }
    ]


def algorithm_type(config: AstunerConfig, plan: TrinityPlan) -> str:
    """…algorithm.WithReference with a KL in the loss, else …algorithm.WithoutReference, which saves a forward pass."""
    kind = "WithReference" if uses_kl_loss(config) else "WithoutReference"
    return f"astuner.backbone.trinity.algorithm.{kind}"


def loss_args(config: AstunerConfig, plan: TrinityPlan) -> dict[str, object]:
    """What astuner's loss is made with: the algorithm, clip range, KL estimator and KL coefficient (0 for none)."""
    common = config.trainer_common
    return {
        "algorithm": common.algorithm.model_dump(mode="json", include=_OF_THE_LOSS),
        "kl_coef": common.kl_loss_coef if uses_kl_loss(config) else 0.0,
        "kl_type": common.kl_loss_type,
    }


def sampling_args(config: AstunerConfig, plan: TrinityPlan) -> dict[str, object]:
    """How many optimiser steps a training step has."""
    return {"updates": config.trainer_common.mini_batch_num}


def sampler_dtype(config: AstunerConfig, plan: TrinityPlan) -> str:
    """The sampler's weights: float32 or bfloat16 (auto: bfloat16 on CUDA)."""
    is_float32 = config.model.dtype == "float32" or (config.model.dtype == "auto" and plan.device == "cpu")
    return "float32" if is_float32 else "bfloat16"


def answer_tokens(config: AstunerConfig, plan: TrinityPlan) -> int:
    """At most one less than max_model_len."""
    return min(config.rollout.max_response_length_in_one_turn, plan.max_model_len - 1)


def engines(config: AstunerConfig, plan: TrinityPlan) -> int:
    """1 for a Tinker service, which sees to that itself."""
    return 1 if plan.uses_tinker else config.rollout.n_vllm_engine


def gpu_share(config: AstunerConfig, plan: TrinityPlan) -> float:
    """0.85 where it is null: engines have GPUs of their own."""
    given = config.rollout.gpu_memory_utilization
    return 0.85 if given is None else given


def gpus_per_node(config: AstunerConfig, plan: TrinityPlan) -> int:
    """As given; null is all GPUs of the machine (8 in a Ray that is joined), or 1 beside a Tinker service."""
    given = config.trainer_common.n_gpus_per_node
    if given is not None:
        return given
    if plan.uses_tinker:
        return 1
    return _USUAL_GPUS if config.trainer_common.ray_address is not None else plan.gpus


def logits_divisor(config: AstunerConfig, plan: TrinityPlan) -> float:
    """1 where it is 0: greedy sampling leaves the logits as they are."""
    return config.rollout.temperature or 1.0


def tokens_per_gpu(config: AstunerConfig, plan: TrinityPlan) -> int:
    """max_tokens_per_micro_batch, raised where the longest sample (max_model_len) would not find room on its GPUs."""
    share = math.ceil(plan.max_model_len / config.trainer_common.ulysses_sequence_parallel_size)
    return max(config.trainer_common.max_tokens_per_micro_batch, share)


def steps_ahead(config: AstunerConfig) -> int:
    """Return how many training steps sampling may begin before the weights have learned from the one before them.

    With weights that are synced every k steps, those in use are up to k - 1 steps older than those that there are.
    """
    return config.asynchrony.max_staleness + 1 - config.asynchrony.sync_interval


def batches_in_flight(config: AstunerConfig, plan: TrinityPlan) -> int:
    """max_staleness + 1 - sync_interval, or 1; for fully_async, which hands over the oldest once more are begun."""
    return max(1, steps_ahead(config))


RULES: Mapping[str, Rule] = {
    rule.__name__: rule
    for rule in (
        mode,
        checkpoint_root_dir,
        namespace,
        model_path,
        max_model_len,
        uses_tinker,
        tinker_base_url,
        engine_type,
        trainer_type,
        runners,
        total_steps,
        updates,
        updates_between_checkpoints,
        updates_between_syncs,
        warmup_updates,
        episodes,
        requested_tasks,
        batches_in_flight,
        algorithm_type,
        loss_args,
        sampling_args,
        sampler_dtype,
        answer_tokens,
        engines,
        gpu_share,
        gpus_per_node,
        logits_divisor,
        tokens_per_gpu,
    )
}


def runner_count(config: AstunerConfig) -> int:
    """Return how many processes run episodes: one, as a process runs any number at a time.

    Trinity gives up whole processes' shares of a step, so that for over-rollout each task has a process to itself, as
    far as `rollout.max_env_worker` goes.
    """
    if not config.asynchrony.over_rollout:
        return 1
    return max(1, min(config.data.train_batch_size, config.rollout.max_env_worker // config.rollout.num_repeat))
