"""Values of verl's configuration that are no plain copies of one key of astuner; mapping.yaml names them.

The first line of a rule's docstring is what the documentation says of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from astuner.backbone.algorithms import (
    ReinforcementRule,
    batch_normalised_advantages,
    group_relative_advantages,
    leave_one_out_advantages,
    resolve,
)
from astuner.backbone.algorithms.policy_loss import (
    clipped_surrogate_loss,
    clipped_weight_loss,
    reinforce_loss,
    sequence_clipped_loss,
)
from astuner.backbone.algorithms.registry import AdvantageFunction, LossFunction
from astuner.backbone.ingredients import validation_repeats
from astuner.backbone.step_credit import uses_kl_loss
from astuner.backbone.verl.plan import VerlPlan
from astuner.config.rollout import RolloutConfig
from astuner.config.root import AstunerConfig

Rule = Callable[[AstunerConfig, VerlPlan], object]

GPUS_PER_NODE = "astuner.trainer_common.n_gpus_per_node"

# Of machines in a cluster, which this one may not be alike.
_USUAL_GPUS = 8

EMBEDDED = "astuner_embedded"
"""verl's name for astuner's own engine."""

_ADVANTAGES: Mapping[AdvantageFunction, str] = {
    group_relative_advantages: "grpo",
    leave_one_out_advantages: "rloo",
    batch_normalised_advantages: "reinforce_plus_plus",
}
_LOSS_MODES: Mapping[LossFunction, str] = {
    clipped_surrogate_loss: "vanilla",
    sequence_clipped_loss: "gspo",
    clipped_weight_loss: "cispo",
    reinforce_loss: "gpg",
}


def model_path(config: AstunerConfig, plan: VerlPlan) -> str:
    """The model's folder or Hugging Face name."""
    return plan.model_path


def rollout_name(config: AstunerConfig, plan: VerlPlan) -> str:
    """vllm; on a CPU astuner_embedded, unless vllm is asked for."""
    return EMBEDDED if plan.rollout_engine == "embedded" else plan.rollout_engine


def device(config: AstunerConfig, plan: VerlPlan) -> str:
    """cpu or cuda."""
    return plan.device


def checkpoint_folder(config: AstunerConfig, plan: VerlPlan) -> str:
    """The checkpoints' folder in the run record."""
    return str(plan.checkpoint_folder)


def total_steps(config: AstunerConfig, plan: VerlPlan) -> int:
    """All steps of the run."""
    return plan.total_steps


def mixed_precision(config: AstunerConfig, plan: VerlPlan) -> dict[str, str]:
    """Computes in float32 or bfloat16 (auto: bfloat16 on CUDA); weights are kept and gradients added in float32."""
    compute = "fp32" if _is_float32(config, plan) else "bf16"
    return {"param_dtype": compute, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


def rollout_dtype(config: AstunerConfig, plan: VerlPlan) -> str:
    """The sampler's weights: float32 or bfloat16 (auto: bfloat16 on CUDA)."""
    return "float32" if _is_float32(config, plan) else "bfloat16"


def _is_float32(config: AstunerConfig, plan: VerlPlan) -> bool:
    return config.model.dtype == "float32" or (config.model.dtype == "auto" and plan.device == "cpu")


def mini_batch_tasks(config: AstunerConfig, plan: VerlPlan) -> int:
    """train_batch_size / mini_batch_num, rounded down; astuner deals the samples, so nothing is dropped."""
    return max(1, config.data.train_batch_size // config.trainer_common.mini_batch_num)


def max_model_len(config: AstunerConfig, plan: VerlPlan) -> int:
    """At most what the model has positions for."""
    wanted = config.rollout.max_model_len
    return wanted if plan.max_positions is None else min(wanted, plan.max_positions)


def tokens_per_gpu(config: AstunerConfig, plan: VerlPlan) -> int:
    """max_tokens_per_micro_batch, raised where the longest sample (max_model_len) would not find room on its GPUs."""
    longest = max_model_len(config, plan)
    share = math.ceil(longest / config.trainer_common.ulysses_sequence_parallel_size)
    return max(config.trainer_common.max_tokens_per_micro_batch, share)


def gpu_share(config: AstunerConfig, plan: VerlPlan) -> float:
    """0.5 where it is null."""
    given = config.rollout.gpu_memory_utilization
    return 0.5 if given is None else given


def logits_divisor(config: AstunerConfig, plan: VerlPlan) -> float:
    """1 where it is 0: greedy sampling leaves the logits as they are."""
    return config.rollout.temperature or 1.0


def logprobs_mode(config: AstunerConfig, plan: VerlPlan) -> str:
    """vLLM's logprobs: processed_logprobs, or raw_logprobs where top_p or top_k cut what is sampled from."""
    # The trainer computes over all tokens. Processed ones are after temperature and cut, raw ones before both.
    return "raw_logprobs" if is_cut(config.rollout) else "processed_logprobs"


def is_cut(rollout: RolloutConfig) -> bool:
    """Whether training samples from some of the tokens only; greedy sampling is not cut further."""
    return rollout.temperature > 0 and (rollout.top_p < 1 or rollout.top_k > 0)


def validation_episodes(config: AstunerConfig, plan: VerlPlan) -> int:
    """The larger of val_pass_n and val_kwargs.num_repeat."""
    return validation_repeats(config)


def validate_first(config: AstunerConfig, plan: VerlPlan) -> bool:
    """False without validation tasks."""
    return config.trainer_common.val_before_train and plan.n_val > 0


def validation_steps(config: AstunerConfig, plan: VerlPlan) -> int:
    """-1, which is never, without validation tasks."""
    return config.trainer_common.test_freq if plan.n_val > 0 else -1


def resume_mode(config: AstunerConfig, plan: VerlPlan) -> str:
    """true is auto, false is disable."""
    return "auto" if config.trainer_common.resume else "disable"


def trainers_per_node(config: AstunerConfig, plan: VerlPlan) -> int:
    """As given; null is all GPUs of the machine (8 in a Ray that is joined) and on a CPU one process."""
    given = config.trainer_common.n_gpus_per_node
    if given is not None:
        return given
    if plan.device == "cpu":
        return 1
    return _USUAL_GPUS if config.trainer_common.ray_address is not None else plan.gpus


def ray_address(config: AstunerConfig, plan: VerlPlan) -> str | None:
    """As it is, or that of the Ray which `--with-ray` has started."""
    return config.trainer_common.ray_address if plan.ray is None else plan.ray.address


def pretended_gpus(config: AstunerConfig, plan: VerlPlan) -> int:
    """As many as there are worker processes."""
    return trainers_per_node(config, plan) * config.trainer_common.nnodes


def advantage_estimator(config: AstunerConfig, plan: VerlPlan) -> str:
    """rloo, reinforce_plus_plus or grpo, whichever the algorithm's advantages are."""
    return _ADVANTAGES[_rule(config).advantage_function]


def has_kl_loss(config: AstunerConfig, plan: VerlPlan) -> bool:
    """Whether use_kl_loss is true and kl_loss_coef not 0: verl then has a reference model."""
    return uses_kl_loss(config)


def divides_by_std(config: AstunerConfig, plan: VerlPlan) -> bool:
    """The algorithm's value where it is null."""
    return _rule(config).norm_adv_by_std


def loss_mode(config: AstunerConfig, plan: VerlPlan) -> str:
    """vanilla (clipped surrogate) but for gspo, cispo and rloo (gpg, REINFORCE's loss)."""
    return _LOSS_MODES[_rule(config).loss_function]


def clip_low(config: AstunerConfig, plan: VerlPlan) -> float:
    """The algorithm's value where it is null."""
    return _rule(config).clip.low


def clip_high(config: AstunerConfig, plan: VerlPlan) -> float:
    """The algorithm's value where it is null."""
    return _rule(config).clip.high


def loss_aggregation(config: AstunerConfig, plan: VerlPlan) -> str:
    """The algorithm's value where it is null."""
    return resolve(config.trainer_common.algorithm).loss_agg_mode


def _rule(config: AstunerConfig) -> ReinforcementRule:
    rule = resolve(config.trainer_common.algorithm).rule
    assert rule is not None, "sft is refused when the configuration is loaded"
    return rule


RULES: Mapping[str, Rule] = {
    rule.__name__: rule
    for rule in (
        model_path,
        rollout_name,
        device,
        checkpoint_folder,
        total_steps,
        mixed_precision,
        rollout_dtype,
        mini_batch_tasks,
        max_model_len,
        tokens_per_gpu,
        gpu_share,
        logits_divisor,
        logprobs_mode,
        has_kl_loss,
        validation_episodes,
        validate_first,
        validation_steps,
        resume_mode,
        trainers_per_node,
        ray_address,
        pretended_gpus,
        advantage_estimator,
        divides_by_std,
        loss_mode,
        clip_low,
        clip_high,
        loss_aggregation,
    )
}
