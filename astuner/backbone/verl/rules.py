"""Computed values of verl's configuration, by name: keys (`key(verl=sets(..., rule=NAME))`) and fixed_settings.yaml.

The first line of each docstring describes the value in docs/en/backbone_verl_keys.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from astuner.algorithms.correction import Correction, resolve_correction
from astuner.algorithms.credit_assignment import uses_kl_loss
from astuner.algorithms.registry import ReinforcementRule, resolve
from astuner.backbone.base import StartedRay
from astuner.backbone.packing.attention import imports_flash_attention
from astuner.backbone.training.run_inputs import validation_repeats
from astuner.config.algorithms import ALGORITHMS, ReinforcementSpec
from astuner.config.corrections import CORRECTIONS, CorrectionSpec
from astuner.config.keys import KeyPath
from astuner.config.root import AstunerConfig
from astuner.llm_engine.causal_lm import compute_dtype

# GPUs of each machine in a Ray cluster that the run joins; this machine may have another number.
_USUAL_GPUS = 8

EMBEDDED = "astuner_embedded"
"""The name under which astuner registers its engine with verl."""
SAMPLER_LOGPROBS = "sampler_log_probs"
"""Key of `Completion.sampler_logprobs` in the additional fields of its answers."""


Device = Literal["cpu", "cuda"]
RolloutEngine = Literal["embedded", "vllm", "sglang"]


@dataclass(frozen=True, slots=True)
class VerlRunFacts:
    """Values that are known only when a run starts: its YAML file does not contain them, or contains them as `auto`.

    Attributes:
        model_path: a local folder or a Hugging Face name.
        checkpoint_folder: folder of astuner's checkpoints; verl itself writes nothing there.
        total_steps: training steps of the run, including those before a resume.
        max_positions: number of positions of the model; None if its configuration does not state it.
        heads: number of attention heads of the model; 0 if it is not known.
        packed_attention: whether astuner's packed attention supports the model; true if the model is not known yet.
        ray: the Ray cluster that a service of the run started; None if the backbone starts one or joins `ray_address`.
        origins: where the user set each key (`file:line`, `command line`), for messages; `LoadedConfig.origins`.
    """

    device: Device
    rollout_engine: RolloutEngine
    model_path: str
    checkpoint_folder: Path = Path()
    total_steps: int = 1
    n_val: int = 0
    max_positions: int | None = None
    heads: int = 0
    packed_attention: bool = True
    flash_attention: bool = field(default_factory=imports_flash_attention)
    gpus: int = field(default_factory=torch.cuda.device_count)
    ray: StartedRay | None = None
    origins: Mapping[KeyPath, str] = field(default_factory=dict)


def model_path(config: AstunerConfig, facts: VerlRunFacts) -> str:
    """The model's folder or Hugging Face name."""
    return facts.model_path


def rollout_name(config: AstunerConfig, facts: VerlRunFacts) -> str:
    """vllm; on a CPU astuner_embedded, unless rollout.name is vllm."""
    return EMBEDDED if facts.rollout_engine == "embedded" else facts.rollout_engine


def device(config: AstunerConfig, facts: VerlRunFacts) -> str:
    """cpu or cuda."""
    return facts.device


def checkpoint_folder(config: AstunerConfig, facts: VerlRunFacts) -> str:
    """The folder of the checkpoints in the run record."""
    return str(facts.checkpoint_folder)


def total_steps(config: AstunerConfig, facts: VerlRunFacts) -> int:
    """The run's number of training steps."""
    return facts.total_steps


def mixed_precision(config: AstunerConfig, facts: VerlRunFacts) -> dict[str, str]:
    """float32 or bfloat16 to compute; weights and gradient sums stay in float32."""
    compute = "fp32" if _is_float32(config, facts) else "bf16"
    return {"param_dtype": compute, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


def rollout_dtype(config: AstunerConfig, facts: VerlRunFacts) -> str:
    """The sampler's data type: float32 or bfloat16."""
    return "float32" if _is_float32(config, facts) else "bfloat16"


def _is_float32(config: AstunerConfig, facts: VerlRunFacts) -> bool:
    return compute_dtype(config.model.dtype, torch.device(facts.device)) == torch.float32


def mini_batch_tasks(config: AstunerConfig, facts: VerlRunFacts) -> int:
    """train_batch_size / mini_batch_num, rounded down; astuner distributes the samples, so none is dropped."""
    return max(1, config.data.train_batch_size // config.trainer_common.mini_batch_num)


def max_model_len(config: AstunerConfig, facts: VerlRunFacts) -> int:
    """max_model_len, limited to the model's number of positions."""
    length = config.rollout.max_model_len
    return length if facts.max_positions is None else min(length, facts.max_positions)


def tokens_per_gpu(config: AstunerConfig, facts: VerlRunFacts) -> int:
    """max_tokens_per_micro_batch, or more if the longest sample (max_model_len) would otherwise not fit."""
    longest = max_model_len(config, facts)
    share = math.ceil(longest / config.trainer_common.ulysses_sequence_parallel_size)
    return max(config.trainer_common.max_tokens_per_micro_batch, share)


def gpu_share(config: AstunerConfig, facts: VerlRunFacts) -> float:
    """The value; 0.5 for null."""
    share = config.rollout.gpu_memory_utilization
    return 0.5 if share is None else share


def logits_divisor(config: AstunerConfig, facts: VerlRunFacts) -> float:
    """The value; 1 for 0, because greedy sampling does not scale the logits."""
    return config.rollout.temperature or 1.0


def logprobs_mode(config: AstunerConfig, facts: VerlRunFacts) -> str:
    """vLLM's logprobs: processed_logprobs, or raw_logprobs if top_p or top_k cut the distribution."""
    # The trainer's logprobs are over all tokens. Processed ones are after temperature and cut, raw ones before both.
    return "raw_logprobs" if config.rollout.is_cut else "processed_logprobs"


def validation_episodes(config: AstunerConfig, facts: VerlRunFacts) -> int:
    """The larger of val_pass_n and val_kwargs.num_repeat; 1 if validation is greedy."""
    return validation_repeats(config)


def validate_first(config: AstunerConfig, facts: VerlRunFacts) -> bool:
    """The value; false without validation tasks."""
    return config.trainer_common.val_before_train and facts.n_val > 0


def validation_steps(config: AstunerConfig, facts: VerlRunFacts) -> int:
    """The value; -1 (never) without validation tasks."""
    return config.trainer_common.test_freq if facts.n_val > 0 else -1


def resume_mode(config: AstunerConfig, facts: VerlRunFacts) -> str:
    """auto for true, disable for false."""
    return "auto" if config.trainer_common.resume else "disable"


def trainers_per_node(config: AstunerConfig, facts: VerlRunFacts) -> int:
    """The value; null is all GPUs of the machine (8 in a Ray cluster that the run joins), and one process on a CPU."""
    if config.trainer_common.n_gpus_per_node is not None:
        return config.trainer_common.n_gpus_per_node
    if facts.device == "cpu":
        return 1
    return _USUAL_GPUS if config.trainer_common.ray_address is not None else facts.gpus


def ray_address(config: AstunerConfig, facts: VerlRunFacts) -> str | None:
    """The value, or the address of the Ray cluster that `--with-ray` started."""
    return config.trainer_common.ray_address if facts.ray is None else facts.ray.address


def pretended_gpus(config: AstunerConfig, facts: VerlRunFacts) -> int:
    """The number of worker processes."""
    return trainers_per_node(config, facts) * config.trainer_common.nnodes


def advantage_estimator(config: AstunerConfig, facts: VerlRunFacts) -> str:
    """The nearest of rloo, reinforce_plus_plus (with and without baseline) and grpo to the algorithm's advantages."""
    return _spec(config).advantage.verl_name


def has_kl_loss(config: AstunerConfig, facts: VerlRunFacts) -> bool:
    """Whether use_kl_loss is true and kl_loss_coef is not 0; verl then loads a reference model."""
    return uses_kl_loss(config)


def divides_by_std(config: AstunerConfig, facts: VerlRunFacts) -> bool:
    """The value; the algorithm's for null."""
    return _rule(config).norm_adv_by_std


def loss_mode(config: AstunerConfig, facts: VerlRunFacts) -> str:
    """vanilla (clipped surrogate), except gspo, cispo, sapo, geo_mean for gmpo, and gpg (REINFORCE) for rloo."""
    return _spec(config).loss.verl_name


def clip_low(config: AstunerConfig, facts: VerlRunFacts) -> float:
    """The value; the algorithm's for null."""
    return _rule(config).clip.low


def clip_high(config: AstunerConfig, facts: VerlRunFacts) -> float:
    """The value; the algorithm's for null."""
    return _rule(config).clip.high


def dual_clip(config: AstunerConfig, facts: VerlRunFacts) -> float:
    """The value; 1e9 (no limit) for null."""
    return config.trainer_common.algorithm.clip_ratio_dual or 1e9


def loss_aggregation(config: AstunerConfig, facts: VerlRunFacts) -> str:
    """The value; the algorithm's for null."""
    return resolve(config.trainer_common.algorithm).loss_agg_mode


def correction_weights(config: AstunerConfig, facts: VerlRunFacts) -> str | None:
    """token or sequence; null without importance weights."""
    return _correction_spec(config, facts).weights


def correction_weight_bounds(config: AstunerConfig, facts: VerlRunFacts) -> float | str:
    """The largest weight, or `smallest_largest` if weights out of the range become 0; 2 without weights."""
    low, high = _correction(config, facts).config.weight_range
    if _correction_spec(config, facts).weights is None:
        return 2.0
    # verl has no weights without bounds. Ratios are limited to e^±20 before.
    low, high = max(low, 1e-9), min(high, 1e9)
    return f"{low:g}_{high:g}" if _correction_spec(config, facts).masks else high


def correction_rejection(config: AstunerConfig, facts: VerlRunFacts) -> str | None:
    """seq_mean_k1 for geo_rs, seq_mean_k3 for k3_rs; else null."""
    return {"geometric": "seq_mean_k1", "k3": "seq_mean_k3"}.get(_correction_spec(config, facts).rejects or "")


def correction_rejection_bounds(config: AstunerConfig, facts: VerlRunFacts) -> float | str | None:
    """`smallest_largest` for geo_rs, the largest value for k3_rs; else null."""
    low, high = _correction(config, facts).config.rejection_range
    kind = _correction_spec(config, facts).rejects
    return f"{low:g}_{high:g}" if kind == "geometric" else high if kind == "k3" else None


def correction_bypass(config: AstunerConfig, facts: VerlRunFacts) -> bool:
    """Whether the ratios use the sampler's logprobs."""
    return not _correction(config, facts).old_from_trainer


def _correction(config: AstunerConfig, facts: VerlRunFacts) -> Correction:
    other_engine = facts.rollout_engine != "embedded"
    return resolve_correction(config, low_precision=not _is_float32(config, facts), can_differ=other_engine)


def _correction_spec(config: AstunerConfig, facts: VerlRunFacts) -> CorrectionSpec:
    return CORRECTIONS[_correction(config, facts).config.mode]


def _spec(config: AstunerConfig) -> ReinforcementSpec:
    spec = ALGORITHMS[config.trainer_common.algorithm.adv_estimator].reinforcement
    assert spec is not None, "sft is rejected when the configuration is loaded"
    return spec


def _rule(config: AstunerConfig) -> ReinforcementRule:
    rule = resolve(config.trainer_common.algorithm).rule
    assert rule is not None, "sft is rejected when the configuration is loaded"
    return rule
