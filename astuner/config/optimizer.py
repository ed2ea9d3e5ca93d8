"""The configuration sections of the update.

They are `trainer_common.optim`, `trainer_common.correction`, `trainer_common.fsdp_config` and `update`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from astuner.config.conditions import (
    AUTO_CORRECTION,
    CONSTANT_LR,
    NO_REJECTION,
    NO_REJECTION_FROM_BELOW,
    NO_WEIGHTS,
    TRUNCATED_WEIGHTS,
)
from astuner.config.corrections import CORRECTIONS, CorrectionName
from astuner.config.section import NonNegativeInt, Section, key, mirrors, sets, unsupported

DecayRate = Annotated[float, Field(ge=0, lt=1)]
_Bound = Annotated[float, Field(gt=0, le=1e9)]
_LOSS_ARGS = mirrors("algorithm.policy_loss_fn_args", rule="loss_args")
_ROLLOUT_CORRECTION = "algorithm.rollout_correction"
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


class CorrectionConfig(Section):
    """`trainer_common.correction`. A null bound is the mode's default."""

    mode: CorrectionName = key(
        "auto",
        verl=mirrors(f"{_ROLLOUT_CORRECTION}.rollout_is", rule="correction_weights")
        + mirrors(f"{_ROLLOUT_CORRECTION}.rollout_is_threshold", rule="correction_weight_bounds")
        + mirrors(f"{_ROLLOUT_CORRECTION}.rollout_rs", rule="correction_rejection")
        + mirrors(f"{_ROLLOUT_CORRECTION}.rollout_rs_threshold", rule="correction_rejection_bounds")
        + mirrors(f"{_ROLLOUT_CORRECTION}.bypass_mode", rule="correction_bypass"),
        trinity=_LOSS_ARGS,
    )
    """The correction (see docs/en/algorithms.md); auto is token_tis where sampler and trainer can differ, else none."""
    old_logprobs: Literal["auto", "trainer", "sampler"] = key(
        "auto",
        verl=mirrors(f"{_ROLLOUT_CORRECTION}.bypass_mode", rule="correction_bypass")
        + mirrors(f"{_ROLLOUT_CORRECTION}.rollout_is", rule="correction_weights"),
        trinity=_LOSS_ARGS,
    )
    """The denominator of the ratios: the trainer's logprobs before the update, or the sampler's."""
    max_weight: _Bound | None = key(
        None,
        no_effect=(AUTO_CORRECTION, NO_WEIGHTS),
        verl=mirrors(f"{_ROLLOUT_CORRECTION}.rollout_is_threshold", rule="correction_weight_bounds"),
        trinity=_LOSS_ARGS,
    )
    """Truncate, or mask, importance weights above this value."""
    min_weight: _Bound | None = key(
        None,
        no_effect=(AUTO_CORRECTION, NO_WEIGHTS, TRUNCATED_WEIGHTS),
        verl=mirrors(f"{_ROLLOUT_CORRECTION}.rollout_is_threshold", rule="correction_weight_bounds"),
        trinity=_LOSS_ARGS,
    )
    """Mask importance weights below this value (token_mis, seq_mis, icepop)."""
    max_rejection: _Bound | None = key(
        None,
        no_effect=(AUTO_CORRECTION, NO_REJECTION),
        verl=mirrors(f"{_ROLLOUT_CORRECTION}.rollout_rs_threshold", rule="correction_rejection_bounds"),
        trinity=_LOSS_ARGS,
    )
    """Leave out calls whose statistic is above this value (geo_rs*, k3_rs*, off_policy_mask)."""
    min_rejection: _Bound | None = key(
        None,
        no_effect=(AUTO_CORRECTION, NO_REJECTION, NO_REJECTION_FROM_BELOW),
        verl=mirrors(f"{_ROLLOUT_CORRECTION}.rollout_rs_threshold", rule="correction_rejection_bounds"),
        trinity=_LOSS_ARGS,
    )
    """Leave out calls whose statistic is below this value (geo_rs*)."""

    @property
    def weight_range(self) -> tuple[float, float]:
        """The smallest and the largest importance weight of the mode."""
        low, high = CORRECTIONS[self.mode].weight_range
        return (
            low if self.min_weight is None or not CORRECTIONS[self.mode].masks else self.min_weight,
            high if self.max_weight is None else self.max_weight,
        )

    @property
    def rejection_range(self) -> tuple[float, float]:
        """The smallest and the largest statistic of a call that the mode trains."""
        spec = CORRECTIONS[self.mode]
        low, high = spec.rejection_range
        return (
            low if self.min_rejection is None or spec.rejects != "geometric" else self.min_rejection,
            high if self.max_rejection is None else self.max_rejection,
        )


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
        verl="in every batch for verl's workers; auto and tree need packed rows and PyTorch's attention",
        trinity="auto and leaf train each timeline once, none each call; tree is not supported",
        unsupported=(
            unsupported(
                "tree",
                by=("trinity",),
                why="its trainer computes whole rows; write auto or leaf (each timeline once) or none (each call)",
            ),
        ),
    )
    """Compute each distinct prefix (tree), timeline (leaf) or call (none) once; auto: the cheaper of tree and leaf."""
