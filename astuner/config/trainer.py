"""Sections on the training loop and its updates: `trainer_common`, `update`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from astuner.config.algorithm_settings import TRINITY_LOSS, AlgorithmConfig, DistillationConfig, KlType
from astuner.config.algorithms import MiniBatchUnit
from astuner.config.corrections import CorrectionConfig
from astuner.config.section import (
    ALL,
    FOR_SFT,
    RAY,
    SAMPLED_ELSEWHERE,
    TINKER_SERVER,
    VERL_ON_CPU,
    Count,
    NonNegativeInt,
    PositiveInt,
    Section,
    Seed,
    from_run,
    key,
    mirrors,
    set_aside,
    sets,
    unsupported,
    when,
)


def _ray_address(address: str) -> str:
    host, _, port = address.rpartition(":")
    if address != "auto" and ("/" in host or not host or not port.isdecimal()):
        raise ValueError("expected host:port of a Ray cluster's head, such as 10.0.0.1:6379, or auto")
    return address


_NO_KL_LOSS = when("use_kl_loss", False, section="trainer_common")
RayAddress = Annotated[str, AfterValidator(_ray_address)]


DecayRate = Annotated[float, Field(ge=0, lt=1)]
PackMode = Literal["auto", "tree", "leaf", "none"]
_LR_SCHEDULE = "astuner sets the learning rate of every step; verl's own schedule stays constant"


class OptimConfig(Section):
    """`trainer_common.optim`: AdamW."""

    lr: Annotated[float, Field(gt=0, le=1)] = key(
        1e-6, verl=mirrors("actor_rollout_ref.actor.optim.lr"), trinity=sets("algorithm.optimizer.lr")
    )
    """Learning rate."""
    betas: tuple[DecayRate, DecayRate] = key(
        (0.9, 0.999), verl=sets("actor_rollout_ref.actor.optim.betas"), trinity=sets("algorithm.optimizer.betas")
    )
    """AdamW's decay rates."""
    weight_decay: Annotated[float, Field(ge=0, le=10)] = key(
        0.0, verl=sets("actor_rollout_ref.actor.optim.weight_decay"), trinity=sets("algorithm.optimizer.weight_decay")
    )
    """AdamW's decoupled weight decay."""
    grad_clip: Annotated[float, Field(gt=0, le=1e9)] = key(
        1.0,
        verl=sets("actor_rollout_ref.actor.optim.clip_grad"),
        trinity=sets("algorithm.optimizer.clip_grad", "trainer.grad_clip"),
    )
    """Maximum norm of the gradient."""
    lr_scheduler: Literal["constant", "cosine", "linear"] = key(
        "constant",
        verl=_LR_SCHEDULE,
        trinity=sets("algorithm.optimizer.lr_scheduler_type"),
        unsupported=unsupported(
            "linear", by=("trinity",), why="Trinity's trainers support constant and cosine; write one of these"
        ),
    )
    """Learning rate after warm-up; cosine and linear end at min_lr_ratio × lr."""
    lr_warmup_steps: NonNegativeInt = key(
        0, verl=_LR_SCHEDULE, trinity=sets("algorithm.optimizer.lr_warmup_steps", rule="warmup_updates")
    )
    """Steps over which the learning rate rises from 0."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = key(
        0.0,
        no_effect=(when("optim.lr_scheduler", "constant", section="trainer_common"),),
        verl=_LR_SCHEDULE,
        trinity=sets("algorithm.optimizer.min_lr_ratio"),
    )
    """Final learning rate of cosine and linear, as a fraction of lr."""


class FsdpConfig(Section):
    """`trainer_common.fsdp_config` (verl, trinity)."""

    param_offload: bool = key(
        True, verl=sets("actor_rollout_ref.actor.fsdp_config.param_offload"), trinity=sets("trainer.param_offload")
    )
    """Keep parameters in host memory between uses."""
    optimizer_offload: bool = key(
        True,
        verl=sets("actor_rollout_ref.actor.fsdp_config.optimizer_offload"),
        trinity=sets("trainer.optimizer_offload"),
    )
    """Keep optimizer state in host memory between uses."""


class TrainerCommonConfig(Section):
    """`trainer_common`: the training loop."""

    seed: Seed = key(
        42,
        verl=sets(
            "actor_rollout_ref.actor.fsdp_config.seed",
            "actor_rollout_ref.ref.fsdp_config.seed",
            "actor_rollout_ref.rollout.seed",
        ),
        trinity=sets("explorer.rollout_model.seed", "model.tinker.seed"),
    )
    """Seed of task order, sampling and initialisation."""
    deterministic: bool = key(
        False,
        trainers="only local computes the same bytes again",
        unsupported=unsupported(
            True,
            by=RAY,
            why="its engines and trainers run concurrently and round differently from run to run; use "
            "--backbone=local for runs that repeat exactly",
        )
        + set_aside(True, by=("debug",), why="debug does not train"),
    )
    """Compute the same bytes in each run with the same seed (local); see [repeatable runs](repeatable_runs.md)."""
    device: Literal["auto", "cpu", "cuda"] = key(
        "auto",
        used_by=ALL,
        no_effect=(SAMPLED_ELSEWHERE,),
        verl=from_run("trainer.device", rule="device"),
        trinity=from_run("model.tinker.enable", rule="uses_tinker")
        + from_run("explorer.rollout_model.engine_type", rule="engine_type")
        + from_run("trainer.trainer_type", rule="trainer_type"),
    )
    """Device of the computation; auto is CUDA if there is a GPU (trinity: two GPUs; verl: here or at `ray_address`)."""
    val_before_train: bool = key(
        False,
        no_effect=(FOR_SFT,),
        verl=mirrors("trainer.val_before_train", rule="validate_first"),
        trinity="astuner requests the validation",
        resume="any",
    )
    """Validate before the first step."""
    val_pass_n: Count = key(
        4,
        no_effect=(FOR_SFT,),
        verl=mirrors("actor_rollout_ref.rollout.val_kwargs.n", rule="validation_episodes"),
        trinity="the number of episodes in a validation",
    )
    """Validation episodes per task, and the largest k of pass@k; greedy validation has one episode per task."""
    save_freq: PositiveInt = key(
        20,
        verl=mirrors("trainer.save_freq"),
        trinity=sets("trainer.save_interval", rule="updates_between_checkpoints"),
        resume="any",
    )
    """Steps between checkpoints."""
    test_freq: PositiveInt = key(
        20,
        verl=mirrors("trainer.test_freq", rule="validation_steps"),
        trinity="astuner requests the validations",
        resume="any",
    )
    """Steps between validations; the last step is always validated."""
    total_epochs: PositiveInt = key(
        50,
        verl=from_run("trainer.total_training_steps", rule="total_steps"),
        trinity=from_run("buffer.total_steps", rule="total_steps") + from_run("trainer.total_steps", rule="updates"),
        resume="more",
    )
    """Passes over the training tasks."""
    total_training_steps: PositiveInt | None = key(
        None,
        verl=from_run("trainer.total_training_steps", rule="total_steps"),
        trinity=from_run("buffer.total_steps", rule="total_steps") + from_run("trainer.total_steps", rule="updates"),
        resume="more",
    )
    """Maximum number of training steps, even if epochs remain."""
    max_checkpoints_to_keep: PositiveInt = key(
        2,
        verl=mirrors("trainer.max_actor_ckpt_to_keep"),
        trinity="checkpoints are part of the run record",
        resume="any",
    )
    """Number of checkpoints to keep; older ones are removed."""
    resume: bool = key(
        True,
        verl=mirrors("trainer.resume_mode", rule="resume_mode"),
        trinity="astuner restores Trinity's state before it starts",
        resume="any",
    )
    """Continue from the last checkpoint of the same experiment, if there is one."""
    nnodes: Count = key(
        1,
        used_by=RAY,
        no_effect=(TINKER_SERVER,),
        verl=sets("trainer.nnodes"),
        trinity=sets("cluster.node_num"),
        resume="any",
    )
    """Number of machines (verl, trinity)."""
    n_gpus_per_node: Count | None = key(
        None,
        used_by=RAY,
        no_effect=(TINKER_SERVER,),
        verl=sets("trainer.n_gpus_per_node", rule="trainers_per_node"),
        trinity=sets("cluster.gpu_per_node", rule="gpus_per_node"),
        resume="any",
    )
    """GPUs per machine (verl, trinity); null is all GPUs of the machine, and one process for verl on a CPU."""
    ray_address: RayAddress | None = key(
        None,
        used_by=RAY,
        verl=sets("+ray_kwargs.ray_init.address", rule="ray_address"),
        trinity="astuner joins or starts Ray before Trinity would",
        resume="any",
    )
    """A Ray cluster to join, `host:port` or auto (verl, trinity); null starts Ray for the run."""
    logger: list[Literal["console", "tensorboard", "wandb", "swanlab", "trackio"]] = key(
        ["console", "tensorboard"],
        trainers="astuner writes the metrics; the trainer's loggers are not used",
        resume="any",
    )
    """Loggers of the metrics, in addition to metrics.jsonl."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """The algorithm. A bare name (`algorithm: sft`) stands for its adv_estimator."""
    correction: CorrectionConfig = key(CorrectionConfig(), no_effect=(FOR_SFT,))
    """Correction of the difference between sampler and trainer. A bare name (`correction: none`) is its mode."""
    distillation: DistillationConfig = key(
        DistillationConfig(),
        no_effect=(FOR_SFT,),
        trainers="astuner asks the teacher, and adds its part to the advantages before the trainer has them",
    )
    """Distillation from a teacher."""
    mini_batch_num: PositiveInt = key(
        1,
        no_effect=(FOR_SFT,),
        verl=mirrors("actor_rollout_ref.actor.ppo_mini_batch_size", rule="mini_batch_tasks"),
        trinity=sets("algorithm.sample_strategy_args", rule="sampling_args")
        + sets("trainer.total_steps", rule="updates")
        + sets("trainer.save_interval", rule="updates_between_checkpoints")
        + sets("synchronizer.trainer_sync_interval", rule="updates_between_syncs")
        + sets("algorithm.optimizer.lr_warmup_steps", rule="warmup_updates")
        + TRINITY_LOSS,
    )
    """Optimizer steps per training step."""
    mini_batch_by: MiniBatchUnit = key(
        "episode",
        no_effect=(FOR_SFT, when("trainer_common.mini_batch_num", 1)),
        trainers="astuner distributes rows to mini-batches",
    )
    """Mini-batches have equally many episodes, or equally many groups, which are then never divided."""
    max_tokens_per_micro_batch: PositiveInt = key(
        16384,
        no_effect=(TINKER_SERVER,),
        verl=sets("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", rule="tokens_per_gpu"),
        trinity=sets("trainer.max_token_len_per_gpu", rule="tokens_per_gpu"),
        resume="any",
    )
    """Padded tokens of one forward pass; a longer sample is computed alone."""
    fsdp_config: FsdpConfig = key(FsdpConfig(), used_by=RAY, no_effect=(TINKER_SERVER, VERL_ON_CPU), resume="any")
    """Sharding (verl, trinity)."""
    optim: OptimConfig = OptimConfig()
    """Optimizer."""
    use_kl_loss: bool = key(
        True,
        verl=sets("actor_rollout_ref.actor.use_kl_loss", rule="has_kl_loss"),
        trinity=mirrors("algorithm.algorithm_type", rule="algorithm_type") + TRINITY_LOSS,
    )
    """Add the KL to the starting model to the loss."""
    kl_loss_coef: Annotated[float, Field(ge=0, le=1000)] = key(
        0.002,
        no_effect=(FOR_SFT, _NO_KL_LOSS),
        verl=sets("actor_rollout_ref.actor.use_kl_loss", rule="has_kl_loss")
        + mirrors("actor_rollout_ref.actor.kl_loss_coef"),
        trinity=mirrors("algorithm.algorithm_type", rule="algorithm_type") + TRINITY_LOSS,
    )
    """Coefficient of the KL in the loss."""
    kl_loss_type: KlType = key(
        "low_var_kl",
        no_effect=(FOR_SFT, _NO_KL_LOSS, when("kl_loss_coef", 0, section="trainer_common")),
        verl=mirrors("actor_rollout_ref.actor.kl_loss_type"),
        trinity=TRINITY_LOSS,
    )
    """Estimator of the KL in the loss."""
    ulysses_sequence_parallel_size: Count = key(
        1,
        used_by=RAY,
        no_effect=(TINKER_SERVER,),
        verl=sets("actor_rollout_ref.actor.ulysses_sequence_parallel_size")
        + sets("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", rule="tokens_per_gpu"),
        trinity=sets("trainer.ulysses_sequence_parallel_size")
        + sets("trainer.max_token_len_per_gpu", rule="tokens_per_gpu"),
        resume="any",
    )
    """GPUs that share one sequence (verl, trinity)."""
    no_signal_patience: PositiveInt = key(
        10, no_effect=(FOR_SFT,), trainers="counts the steps without signal", resume="any"
    )
    """Consecutive steps without reward variance in any group after which the run warns."""
    stop_on_no_signal: bool = key(False, no_effect=(FOR_SFT,), trainers="ends the run", resume="any")
    """Stop with a non-zero exit code instead of warning."""


class UpdateConfig(Section):
    """`update`: how an update is computed."""

    pack: PackMode = key(
        "auto",
        verl="in every batch for verl's workers; auto and tree need packed rows and PyTorch's attention",
        trinity="auto and leaf train each timeline once, none each call; tree is not supported",
        unsupported=unsupported(
            "tree",
            by=("trinity",),
            why="its trainer computes whole rows; write auto or leaf (each timeline once) or none (each call)",
        ),
    )
    """Compute each distinct prefix (tree), timeline (leaf) or call (none) once; auto: the cheaper of tree and leaf."""
