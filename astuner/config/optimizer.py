"""The configuration sections of the update: `trainer_common.optim`, `trainer_common.fsdp_config` and `update`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from astuner.config.conditions import CONSTANT_LR
from astuner.config.section import RAY, NonNegativeInt, Section, key, mirrors, sets, unsupported

DecayRate = Annotated[float, Field(ge=0, lt=1)]
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
        0.0,
        verl=sets("actor_rollout_ref.actor.optim.weight_decay"),
        trinity=sets("algorithm.optimizer.weight_decay"),
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
        unsupported=(
            unsupported(
                "linear", by=("trinity",), why="Trinity's trainers support constant and cosine; write one of these"
            ),
        ),
    )
    """Learning rate after warm-up; cosine and linear end at min_lr_ratio × lr."""
    lr_warmup_steps: NonNegativeInt = key(
        0, verl=_LR_SCHEDULE, trinity=sets("algorithm.optimizer.lr_warmup_steps", rule="warmup_updates")
    )
    """Steps over which the learning rate rises from 0."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = key(
        0.0, no_effect=(CONSTANT_LR,), verl=_LR_SCHEDULE, trinity=sets("algorithm.optimizer.min_lr_ratio")
    )
    """Final learning rate of cosine and linear, as a fraction of lr."""


class FsdpConfig(Section):
    """`trainer_common.fsdp_config` (verl, trinity)."""

    param_offload: bool = key(
        True,
        verl=sets("actor_rollout_ref.actor.fsdp_config.param_offload"),
        trinity=sets("trainer.param_offload"),
    )
    """Keep parameters in host memory between uses."""
    optimizer_offload: bool = key(
        True,
        verl=sets("actor_rollout_ref.actor.fsdp_config.optimizer_offload"),
        trinity=sets("trainer.optimizer_offload"),
    )
    """Keep optimizer state in host memory between uses."""


PackMode = Literal["auto", "tree", "leaf", "none"]


class UpdateConfig(Section):
    """`update`: how an update is computed."""

    pack: PackMode = key(
        "auto",
        trainers="auto and leaf train each timeline once, none each call; tree is not supported",
        unsupported=(
            unsupported(
                "tree",
                by=RAY,
                why="its trainer computes whole rows; write auto or leaf (each timeline once) or none (each call)",
            ),
        ),
    )
    """Compute each distinct prefix (tree), timeline (leaf) or call (none) once; auto: the cheaper of tree and leaf."""
