"""Computed values of Trinity's configuration, by name: keys (`key(trinity=sets(..., rule=NAME))`), fixed_settings.yaml.

The first line of each docstring describes the value in docs/en/backbone_trinity_keys.md. A step of Trinity's trainer is
one optimizer step; a training step of astuner has `trainer_common.mini_batch_num` of them.
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
from astuner.backbone.packing.attention import imports_flash_attention
from astuner.config.keys import KeyPath
from astuner.config.root import AstunerConfig
from astuner.llm_engine.causal_lm import compute_dtype

_LOSS_KEYS = {
    "adv_estimator",
    "clip_ratio_low",
    "clip_ratio_high",
    "clip_ratio_dual",
    "loss_agg_mode",
    "norm_adv_by_std",
}
# GPUs of each machine in a Ray cluster that the run joins; this machine may have another number.
_USUAL_GPUS = 8
# The metrics of the correction for this staleness include those of larger values.
_OLDEST_MEASURED = 4


Device = Literal["cpu", "cuda"]
Mode = Literal["both", "bench"]


@dataclass(frozen=True, slots=True)
class TrinityRunFacts:
    """Values that are known only when a run starts: its YAML file does not contain them, or contains them as `auto`.

    Attributes:
        mode: `both` samples and trains, `bench` only samples.
        model_path: an absolute folder without a colon, or a Hugging Face name.
        checkpoint_root_dir: folder of Trinity's state, from which astuner creates checkpoints.
        total_steps: training steps of the run, including those before a resume.
        max_model_len: maximum number of tokens of prompt and answer together.
        tinker_base_url: address of the Tinker service that trains and samples; None for vLLM and verl on GPUs.
        takes_policy: whether that service takes temperature, alpha and modules of adapters (`TinkerPolicy`).
        heads: number of attention heads of the model; 0 if it is not known.
        runners: number of processes that run episodes, per engine.
        origins: where the user set each key (`file:line`, `command line`), for messages; `LoadedConfig.origins`.
    """

    mode: Mode
    device: Device
    model_path: str
    checkpoint_root_dir: Path
    total_steps: int
    namespace: str
    max_model_len: int
    tinker_base_url: str | None = None
    takes_policy: bool = True
    heads: int = 0
    runners: int = 1
    validates: bool = False
    flash_attention: bool = field(default_factory=imports_flash_attention)
    gpus: int = field(default_factory=torch.cuda.device_count)
    origins: Mapping[KeyPath, str] = field(default_factory=dict)

    @property
    def uses_tinker(self) -> bool:
        """True if a Tinker service trains and samples."""
        return self.tinker_base_url is not None


def mode(config: AstunerConfig, facts: TrinityRunFacts) -> str:
    """both for training, bench for a dry run."""
    return facts.mode


def checkpoint_root_dir(config: AstunerConfig, facts: TrinityRunFacts) -> str:
    """A folder in the run record."""
    return str(facts.checkpoint_root_dir)


def namespace(config: AstunerConfig, facts: TrinityRunFacts) -> str:
    """The namespace of the run's Ray actors."""
    return facts.namespace


def model_path(config: AstunerConfig, facts: TrinityRunFacts) -> str:
    """The model's folder or Hugging Face name."""
    return facts.model_path


def max_model_len(config: AstunerConfig, facts: TrinityRunFacts) -> int:
    """max_model_len, limited to the model's number of positions."""
    return facts.max_model_len


def uses_tinker(config: AstunerConfig, facts: TrinityRunFacts) -> bool:
    """Whether a Tinker service samples and trains."""
    return facts.uses_tinker


def tinker_base_url(config: AstunerConfig, facts: TrinityRunFacts) -> str | None:
    """The service's address."""
    return facts.tinker_base_url


def engine_type(config: AstunerConfig, facts: TrinityRunFacts) -> str:
    """tinker or vllm."""
    return "tinker" if facts.uses_tinker else "vllm"


def trainer_type(config: AstunerConfig, facts: TrinityRunFacts) -> str:
    """tinker or verl."""
    return "tinker" if facts.uses_tinker else "verl"


def runners(config: AstunerConfig, facts: TrinityRunFacts) -> int:
    """The number of processes that run episodes, per engine."""
    return facts.runners


def total_steps(config: AstunerConfig, facts: TrinityRunFacts) -> int:
    """The run's number of training steps."""
    return facts.total_steps


def updates(config: AstunerConfig, facts: TrinityRunFacts) -> int:
    """The run's number of training steps × mini_batch_num."""
    return facts.total_steps * config.trainer_common.mini_batch_num


def updates_between_checkpoints(config: AstunerConfig, facts: TrinityRunFacts) -> int:
    """save_freq × mini_batch_num."""
    return config.trainer_common.save_freq * config.trainer_common.mini_batch_num


def updates_between_syncs(config: AstunerConfig, facts: TrinityRunFacts) -> int:
    """sync_interval × mini_batch_num."""
    return config.asynchrony.sync_interval * config.trainer_common.mini_batch_num


def warmup_updates(config: AstunerConfig, facts: TrinityRunFacts) -> int:
    """lr_warmup_steps × mini_batch_num."""
    return config.trainer_common.optim.lr_warmup_steps * config.trainer_common.mini_batch_num


def expected_samples(config: AstunerConfig, facts: TrinityRunFacts) -> int:
    """train_batch_size × num_repeat × expected_steps; a step trains all samples, even if their number differs."""
    return config.data.train_batch_size * config.rollout.num_repeat * config.rollout.multi_turn.expected_steps


def requested_tasks(config: AstunerConfig, facts: TrinityRunFacts) -> list[dict[str, str]]:
    """The reader of validation requests; none for fully_async, in which Trinity does not validate."""
    if config.asynchrony.sync_style == "fully_async":
        return []
    package = "astuner.backbone.trinity"
    return [
        {
            "name": "request",
            "path": "astuner",
            "storage_type": f"{package}.explorer_plugins.EvaluationReader",
            "default_workflow_type": f"{package}.explorer_plugins.EpisodeWorkflow",
        }
    ]


def algorithm_type(config: AstunerConfig, facts: TrinityRunFacts) -> str:
    """The class WithReference if the loss has a KL, else WithoutReference, which saves a forward pass."""
    kind = "WithReference" if uses_kl_loss(config) else "WithoutReference"
    return f"astuner.backbone.trinity.trainer_plugins.{kind}"


def run_correction(run: AstunerConfig, facts: TrinityRunFacts) -> Correction:
    """Return the correction of a run. This is no rule for a key of Trinity."""
    return resolve_correction(
        run,
        low_precision=sampler_dtype(run, facts) != "float32",
        can_differ=not facts.uses_tinker or not facts.takes_policy or run.asynchrony.max_staleness > 0,
    )


def loss_args(config: AstunerConfig, facts: TrinityRunFacts) -> dict[str, object]:
    """Arguments of astuner's loss: algorithm, clip range, KL estimator and coefficient (0 for none), and correction."""
    common = config.trainer_common
    correction = run_correction(config, facts)
    staleness = config.asynchrony.max_staleness
    return {
        "algorithm": common.algorithm.model_dump(mode="json", include=_LOSS_KEYS),
        "kl_coef": common.kl_loss_coef if uses_kl_loss(config) else 0.0,
        "kl_type": common.kl_loss_type,
        "correction": correction.config.model_dump(mode="json"),
        "old_from_trainer": correction.old_from_trainer,
        # For how many values of the staleness the correction is measured; 0 in synchronous training.
        "ages": min(staleness, _OLDEST_MEASURED) + 1 if staleness else 0,
    }


def entropy_loss(config: AstunerConfig, facts: TrinityRunFacts) -> str:
    """The class EntropyBonus, or none for 0."""
    has_bonus = config.trainer_common.algorithm.entropy_coef > 0
    return "astuner.backbone.trinity.trainer_plugins.EntropyBonus" if has_bonus else "none"


def entropy_args(config: AstunerConfig, facts: TrinityRunFacts) -> dict[str, object]:
    """The value, as the argument entropy_coef."""
    return {"entropy_coef": config.trainer_common.algorithm.entropy_coef}


def sampling_args(config: AstunerConfig, facts: TrinityRunFacts) -> dict[str, object]:
    """The number of optimizer steps in a training step."""
    return {"updates": config.trainer_common.mini_batch_num}


def sampler_dtype(config: AstunerConfig, facts: TrinityRunFacts) -> str:
    """The sampler's data type: float32 or bfloat16."""
    is_float32 = compute_dtype(config.model.dtype, torch.device(facts.device)) == torch.float32
    return "float32" if is_float32 else "bfloat16"


def answer_tokens(config: AstunerConfig, facts: TrinityRunFacts) -> int:
    """max_response_length_in_one_turn, limited to max_model_len - 1."""
    return min(config.rollout.max_response_length_in_one_turn, facts.max_model_len - 1)


def engines(config: AstunerConfig, facts: TrinityRunFacts) -> int:
    """The value; 1 with a Tinker service, which has its own engines."""
    return engine_count(config, uses_tinker=facts.uses_tinker)


def gpu_share(config: AstunerConfig, facts: TrinityRunFacts) -> float:
    """The value; 0.85 for null, because engines do not share their GPUs."""
    share = config.rollout.gpu_memory_utilization
    return 0.85 if share is None else share


def gpus_per_node(config: AstunerConfig, facts: TrinityRunFacts) -> int:
    """The value; null is all GPUs of the machine (8 in a Ray cluster that the run joins); 1 with a Tinker service."""
    if config.trainer_common.n_gpus_per_node is not None:
        return config.trainer_common.n_gpus_per_node
    if facts.uses_tinker:
        return 1
    return _USUAL_GPUS if config.trainer_common.ray_address is not None else facts.gpus


def logits_divisor(config: AstunerConfig, facts: TrinityRunFacts) -> float:
    """The value; 1 for 0, because greedy sampling does not scale the logits."""
    return config.rollout.temperature or 1.0


def tokens_per_gpu(config: AstunerConfig, facts: TrinityRunFacts) -> int:
    """max_tokens_per_micro_batch, raised if the longest sample (max_model_len) would not fit its GPUs."""
    share = math.ceil(facts.max_model_len / config.trainer_common.ulysses_sequence_parallel_size)
    return max(config.trainer_common.max_tokens_per_micro_batch, share)


def steps_ahead(config: AstunerConfig) -> int:
    """Return how many training steps sampling may start ahead of the weights' training.

    With a sync every k steps, the sampler's weights are up to k - 1 steps older than the trainer's.
    """
    return config.asynchrony.max_staleness + 1 - config.asynchrony.sync_interval


def batches_in_flight(config: AstunerConfig, facts: TrinityRunFacts) -> int:
    """max_staleness + 1 - sync_interval, at least 1."""
    return max(1, steps_ahead(config))


def engine_count(config: AstunerConfig, *, uses_tinker: bool) -> int:
    """Return the number of engines; a Tinker service counts as one."""
    return 1 if uses_tinker else config.rollout.n_vllm_engine


def runners_per_engine(config: AstunerConfig, engines: int) -> int:
    """Return the number of processes that run episodes, per engine: one, which runs any number at a time.

    With over-rollout, Trinity drops whole processes' shares of a step, so each task gets its own process, up to
    `rollout.max_env_worker` episodes of all engines together.
    """
    if not config.asynchrony.over_rollout:
        return 1
    tasks = math.ceil(config.data.train_batch_size / engines)
    return max(1, min(tasks, config.rollout.max_env_worker // (config.rollout.num_repeat * engines)))
