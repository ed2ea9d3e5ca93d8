"""Section `trainer_common`: the training loop, its algorithm and its optimiser."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from astuner.config.section import Section

AlgorithmName = Literal["grpo", "dr_grpo", "dapo", "rloo", "reinforce++", "gspo", "cispo", "sft"]
KlType = Literal["k1", "k2", "low_var_kl"]
DecayRate = Annotated[float, Field(ge=0, lt=1)]


def _ray_address(address: str) -> str:
    host, _, port = address.rpartition(":")
    if address != "auto" and ("/" in host or not host or not port.isdecimal()):
        raise ValueError("expected host:port of a Ray cluster's head, such as 10.0.0.1:6379, or auto")
    return address


RayAddress = Annotated[str, AfterValidator(_ray_address)]


class AlgorithmConfig(Section):
    """`trainer_common.algorithm`. What is null takes the value that the algorithm's paper uses."""

    adv_estimator: AlgorithmName = "grpo"
    """grpo, dr_grpo, dapo, rloo, reinforce++, gspo, cispo, or sft (supervised, on transcripts)."""
    clip_ratio_low: PositiveFloat | None = None
    """Clip the probability ratio below 1 - this."""
    clip_ratio_high: PositiveFloat | None = None
    """Clip the probability ratio above 1 + this."""
    loss_agg_mode: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"] | None = None
    """How token losses become one number: over all tokens, over episodes of token means, or over a fixed length."""
    norm_adv_by_std: bool | None = None
    """Divide advantages by the group's standard deviation."""
    task_norm_patch: bool = False
    """Older name for norm_adv_by_std over the whole batch; not offered."""
    use_kl_in_reward: bool = False
    """Subtract the KL estimate to the starting model from the reward."""
    kl_penalty: KlType = "k1"
    """Estimator of the KL in the reward."""
    kl_coef: NonNegativeFloat = 0.001
    """Coefficient of the KL in the reward."""
    overlong_buffer_length: NonNegativeInt = 0
    """DAPO's soft punishment: within this many tokens of max_response_length up to 1 of reward is lost; 0 is off."""
    prompt_loss_weight: NonNegativeFloat = 0.0
    """sft: the weight of tokens that the assistant did not write (its own weigh 1)."""


class OptimConfig(Section):
    """`trainer_common.optim`: AdamW."""

    lr: PositiveFloat = 1e-6
    """Learning rate."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.999)
    """AdamW's decay rates."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay."""
    grad_clip: PositiveFloat = 1.0
    """Largest norm of the gradient."""
    lr_scheduler: Literal["constant", "cosine", "linear"] = "constant"
    """Learning rate after warm-up; cosine and linear end at min_lr_ratio × lr."""
    lr_warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises from 0."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Where cosine and linear end, as a share of lr."""


class FsdpConfig(Section):
    """`trainer_common.fsdp_config` (verl, trinity)."""

    param_offload: bool = True
    """Keep parameters in host memory between uses."""
    optimizer_offload: bool = True
    """Keep optimiser state in host memory between uses."""


PackMode = Literal["auto", "tree", "leaf", "none"]


class UpdateConfig(Section):
    """`update`: how an update is computed (local)."""

    pack: PackMode = "auto"
    """Compute once: tree, each distinct prefix; leaf, each timeline; none, each call; auto takes the cheaper of two."""


class TrainerCommonConfig(Section):
    """`trainer_common`: the training loop."""

    seed: NonNegativeInt = 42
    """Seeds task order, sampling and initialisation."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the local and the verl backbone compute; auto is CUDA where there is one."""
    val_before_train: bool = False
    """Validate before the first step."""
    val_pass_n: PositiveInt = 4
    """Validation episodes per task, and the largest k of pass@k."""
    save_freq: PositiveInt = 20
    """Steps between checkpoints."""
    test_freq: PositiveInt = 20
    """Steps between validations; the last step is always validated."""
    total_epochs: PositiveInt = 50
    """Passes over the training tasks."""
    total_training_steps: PositiveInt | None = None
    """Stop after this many steps even if epochs remain."""
    max_checkpoints_to_keep: PositiveInt = 2
    """Older checkpoints are removed."""
    resume: bool = True
    """Go on from the last checkpoint of the same experiment where there is one."""
    nnodes: PositiveInt = 1
    """Machines (verl, trinity)."""
    n_gpus_per_node: PositiveInt | None = None
    """GPUs per machine (verl, trinity); null is all that a machine has, for verl one process on a CPU."""
    ray_address: RayAddress | None = None
    """A Ray cluster to join, `host:port` or auto (verl, trinity); null starts Ray for the run."""
    logger: list[Literal["console", "tensorboard", "wandb", "swanlab", "trackio"]] = Field(
        default=["console", "tensorboard"]
    )
    """Where metrics go, beside metrics.jsonl."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """The algorithm. A bare name (`algorithm: sft`) stands for its adv_estimator."""
    mini_batch_num: PositiveInt = 1
    """Optimiser steps per training step."""
    max_tokens_per_micro_batch: PositiveInt = 16384
    """Padded tokens of one forward pass; a longer sample goes alone."""
    fsdp_config: FsdpConfig = FsdpConfig()
    """Sharding (verl, trinity)."""
    optim: OptimConfig = OptimConfig()
    """Optimiser."""
    use_kl_loss: bool = True
    """Add the KL to the starting model to the loss."""
    kl_loss_coef: NonNegativeFloat = 0.002
    """Coefficient of the KL in the loss."""
    kl_loss_type: KlType = "low_var_kl"
    """Estimator of the KL in the loss."""
    ulysses_sequence_parallel_size: PositiveInt = 1
    """Sequence-parallel GPUs (verl, trinity)."""
    no_signal_patience: PositiveInt = 10
    """Steps in a row without reward variance in any group after which the run says so."""
    stop_on_no_signal: bool = False
    """Then stop with a non-zero exit code instead of going on."""
