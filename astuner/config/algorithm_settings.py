"""Section `trainer_common.algorithm`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from astuner.config.algorithms import ALGORITHMS, AlgorithmName, DynamicSampling, LossAggMode
from astuner.config.conditions import FOR_SFT, KL_COEF_0, NOT_GDPO, NOT_GIGPO, WITHOUT_KL_IN_REWARD, WITHOUT_REFILL
from astuner.config.section import NonNegativeInt, PositiveInt, Section, key, mirrors, sets, unsupported

KlType = Literal["k1", "k2", "low_var_kl"]

_NOT_FOR_SFT = {"sft": "it learns from transcripts and has no rewards, advantages or probability ratios"}
_NO_CLIPPING = _NOT_FOR_SFT | {
    name: "its loss clips no probability ratio; dr_grpo's does"
    for name, spec in ALGORITHMS.items()
    if spec.reinforcement and spec.reinforcement.clip is None
}
_NO_DUAL_CLIP = _NO_CLIPPING | {
    name: "only the clipped ratio of grpo and others has a dual clip"
    for name, spec in ALGORITHMS.items()
    if spec.reinforcement and spec.reinforcement.loss.function in ("clipped_weight_loss", "geometric_mean_loss")
}
_ONLY_REWARDS = _NOT_FOR_SFT | {
    "maxrl": "it divides rewards by the mean of their group, so it needs rewards of at least 0 that nothing is "
    "subtracted from"
}
_NO_GROUPS = _NOT_FOR_SFT | {
    name: "it compares all episodes of a step with each other, not those of one task; reinforce++_baseline does"
    for name, spec in ALGORITHMS.items()
    if spec.reinforcement and not spec.reinforcement.advantage.compares_group
}
_ONLY_SFT = {
    name: "it trains only what the model itself sampled; sft uses this key"
    for name, spec in ALGORITHMS.items()
    if spec.reinforcement
}
TRINITY_LOSS = mirrors("algorithm.policy_loss_fn_args", rule="loss_args")


class AlgorithmConfig(Section):
    """`trainer_common.algorithm`. A value of null stands for the value in the algorithm's paper."""

    adv_estimator: AlgorithmName = key(
        "grpo",
        verl=mirrors("algorithm.adv_estimator", rule="advantage_estimator")
        + mirrors("algorithm.norm_adv_by_std_in_grpo", rule="divides_by_std")
        + mirrors("actor_rollout_ref.actor.policy_loss.loss_mode", rule="loss_mode")
        + mirrors("actor_rollout_ref.actor.clip_ratio_low", rule="clip_low")
        + mirrors("actor_rollout_ref.actor.clip_ratio_high", rule="clip_high")
        + mirrors("actor_rollout_ref.actor.loss_agg_mode", rule="loss_aggregation"),
        trinity=TRINITY_LOSS,
        unsupported=(
            unsupported(
                "sft", by=("verl",), why="verl trains on transcripts with another program; use --backbone=local"
            ),
            unsupported(
                "sft",
                by=("trinity",),
                why="Trinity trains on transcripts in a separate mode, which has no workflow; use --backbone=local",
            ),
        ),
    )
    """The algorithm (see docs/en/algorithms.md); sft is supervised training on transcripts."""
    clip_ratio_low: Annotated[float, Field(gt=0, le=1e9)] | None = key(
        None,
        wrong_for=_NO_CLIPPING,
        verl=mirrors("actor_rollout_ref.actor.clip_ratio_low", rule="clip_low"),
        trinity=TRINITY_LOSS,
    )
    """Clip the probability ratio below 1 - this value."""
    clip_ratio_high: Annotated[float, Field(gt=0, le=1e9)] | None = key(
        None,
        wrong_for=_NO_CLIPPING,
        verl=mirrors("actor_rollout_ref.actor.clip_ratio_high", rule="clip_high"),
        trinity=TRINITY_LOSS,
    )
    """Clip the probability ratio above 1 + this value."""
    clip_ratio_dual: Annotated[float, Field(gt=1, le=1e9)] | None = key(
        None,
        wrong_for=_NO_DUAL_CLIP,
        verl=mirrors("actor_rollout_ref.actor.clip_ratio_c", rule="dual_clip"),
        trinity=TRINITY_LOSS,
    )
    """Dual-clip PPO: the largest probability ratio of tokens with negative advantages; null for no limit."""
    loss_agg_mode: LossAggMode | None = key(
        None,
        verl=mirrors("actor_rollout_ref.actor.loss_agg_mode", rule="loss_aggregation"),
        trinity=TRINITY_LOSS,
    )
    """Aggregation of the token losses: over all tokens, over episodes' token means, or over a fixed length."""
    norm_adv_by_std: bool | None = key(
        None,
        wrong_for=_NOT_FOR_SFT,
        verl=mirrors("algorithm.norm_adv_by_std_in_grpo", rule="divides_by_std"),
        trinity=TRINITY_LOSS,
    )
    """Divide advantages by the group's standard deviation."""
    task_norm_patch: bool = key(
        False,
        unsupported=(
            unsupported(
                True,
                why="it is no longer supported; norm_adv_by_std sets whether advantages are divided by the group's "
                "standard deviation",
            ),
        ),
    )
    """Older name for norm_adv_by_std over the whole batch; not supported."""
    use_kl_in_reward: bool = key(
        False,
        wrong_for=_ONLY_REWARDS,
        verl=sets("algorithm.use_kl_in_reward"),
        unsupported=(
            unsupported(
                True,
                by=("trinity",),
                why="advantages are computed as soon as episodes end, and the trainer computes the starting model's "
                "logprobs later; write use_kl_loss: true",
            ),
        ),
    )
    """Subtract the estimated KL to the starting model from the reward."""
    kl_penalty: KlType = key(
        "k1",
        no_effect=(FOR_SFT, WITHOUT_KL_IN_REWARD, KL_COEF_0),
        verl=mirrors("algorithm.kl_penalty"),
        trinity="for use_kl_in_reward, which this backbone does not support",
    )
    """Estimator of the KL in the reward."""
    kl_coef: Annotated[float, Field(ge=0, le=1000)] = key(
        0.001,
        no_effect=(FOR_SFT, WITHOUT_KL_IN_REWARD),
        verl=mirrors("algorithm.kl_ctrl.kl_coef"),
        trinity="for use_kl_in_reward, which this backbone does not support",
    )
    """Coefficient of the KL in the reward."""
    dynamic_sampling: DynamicSampling | None = key(
        None,
        wrong_for=_NO_GROUPS,
        trainers="groups are left out before the trainer gets them",
        unsupported=(
            unsupported(
                "refill",
                by=("trinity",),
                why="Trinity's explorer runs the tasks of a training step in one batch and cannot add further ones; "
                "use drop, --backbone=local or --backbone=verl",
            ),
        ),
    )
    """Groups whose rewards are all equal: none trains them, drop leaves them out, refill also runs further tasks."""
    max_refills: PositiveInt = key(
        3, no_effect=(WITHOUT_REFILL,), trainers="bounds the batches of further tasks that astuner runs"
    )
    """refill: how often a step runs further tasks at most, each time as many as it has too few groups."""
    overlong_buffer_length: NonNegativeInt = key(
        0, wrong_for=_ONLY_REWARDS, trainers="subtracted from the reward before advantages are computed"
    )
    """DAPO's soft penalty: up to 1 of reward is lost within this many tokens of max_response_length; 0 is off."""
    entropy_coef: Annotated[float, Field(ge=0, le=1000)] = key(
        0.0,
        wrong_for=_NOT_FOR_SFT,
        verl=mirrors("actor_rollout_ref.actor.entropy_coeff"),
        trinity=mirrors("algorithm.entropy_loss_fn", rule="entropy_loss")
        + mirrors("algorithm.entropy_loss_fn_args", rule="entropy_args"),
    )
    """Coefficient of the entropy bonus: the loss is reduced by this value times the entropy of the policy."""
    high_entropy_share: Annotated[float, Field(gt=0, le=1)] = key(
        1.0,
        wrong_for=_NOT_FOR_SFT,
        verl="the policy loss of the other tokens is 0; another forward pass of each mini-batch finds them",
        unsupported=(
            unsupported(
                by=("trinity",),
                why="its loss gets a part of a mini-batch at a time, and the share is of the whole mini-batch; use "
                "--backbone=local or --backbone=verl",
            ),
        ),
    )
    """Train only this share of a mini-batch's tokens, those with the highest entropy (0.2 in the paper); 1 is off."""
    mask_truncated_answers: bool = key(
        False, wrong_for=_NOT_FOR_SFT, trainers="episodes are left out before the trainer gets them"
    )
    """Do not train episodes with an answer that reached its length limit; their rewards still count in the group."""
    component_weights: dict[str, Annotated[float, Field(ge=-1e6, le=1e6)]] = key(
        {}, no_effect=(NOT_GDPO,), trainers="weights the components before advantages are computed"
    )
    """gdpo: the weights of the components of the reward by name. Default: 1 for each whose name has no dot."""
    step_advantage_coef: Annotated[float, Field(ge=0, le=1000)] = key(
        1.0, no_effect=(NOT_GIGPO,), trainers="weights the advantages of steps before the trainer gets them"
    )
    """gigpo: the coefficient of the advantages of steps over the other steps from the same state."""
    prompt_loss_weight: Annotated[float, Field(ge=0, le=1000)] = key(
        0.0, wrong_for=_ONLY_SFT, trainers="for sft, which this backbone does not support"
    )
    """sft: the weight of tokens that the assistant did not write (its own tokens have weight 1)."""

    @property
    def selects_by_entropy(self) -> bool:
        """Whether only the tokens with the highest entropy are trained."""
        return self.high_entropy_share < 1
