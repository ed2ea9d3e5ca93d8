"""Sections `trainer_common.algorithm` and `trainer_common.distillation`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from astuner.config.algorithms import ALGORITHMS, AlgorithmName, DynamicSampling, LossAggMode
from astuner.config.section import (
    FOR_SFT,
    NOT_NULL,
    NonNegativeInt,
    PositiveInt,
    Seconds,
    Section,
    Variant,
    key,
    mirrors,
    only,
    sets,
    unsupported,
    when,
)

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
_NO_KL_IN_REWARD = when("algorithm.use_kl_in_reward", False, section="trainer_common")
TRINITY_LOSS = mirrors("algorithm.policy_loss_fn_args", rule="loss_args")
_VERL_STD = mirrors("algorithm.norm_adv_by_std_in_grpo", rule="divides_by_std")
_VERL_CLIP_LOW = mirrors("actor_rollout_ref.actor.clip_ratio_low", rule="clip_low")
_VERL_CLIP_HIGH = mirrors("actor_rollout_ref.actor.clip_ratio_high", rule="clip_high")
_VERL_AGGREGATION = mirrors("actor_rollout_ref.actor.loss_agg_mode", rule="loss_aggregation")


class AlgorithmConfig(Section):
    """`trainer_common.algorithm`. A value of null stands for the value in the algorithm's paper."""

    chosen_by: ClassVar[str] = "adv_estimator"

    adv_estimator: AlgorithmName = key(
        "grpo",
        verl=mirrors("algorithm.adv_estimator", rule="advantage_estimator")
        + _VERL_STD
        + mirrors("actor_rollout_ref.actor.policy_loss.loss_mode", rule="loss_mode")
        + (_VERL_CLIP_LOW + _VERL_CLIP_HIGH + _VERL_AGGREGATION),
        trinity=TRINITY_LOSS,
        unsupported=unsupported(
            "sft", by=("verl",), why="verl trains on transcripts with another program; use --backbone=local"
        )
        + unsupported(
            "sft",
            by=("trinity",),
            why="Trinity trains on transcripts in a separate mode, which has no workflow; use --backbone=local",
        ),
    )
    """The algorithm (see docs/en/algorithms.md); sft is supervised training on transcripts."""
    clip_ratio_low: Annotated[float, Field(gt=0, le=1e9)] | None = key(
        None, wrong_for=_NO_CLIPPING, verl=_VERL_CLIP_LOW, trinity=TRINITY_LOSS
    )
    """Clip the probability ratio below 1 - this value."""
    clip_ratio_high: Annotated[float, Field(gt=0, le=1e9)] | None = key(
        None, wrong_for=_NO_CLIPPING, verl=_VERL_CLIP_HIGH, trinity=TRINITY_LOSS
    )
    """Clip the probability ratio above 1 + this value."""
    clip_ratio_dual: Annotated[float, Field(gt=1, le=1e9)] | None = key(
        None,
        wrong_for=_NO_DUAL_CLIP,
        verl=mirrors("actor_rollout_ref.actor.clip_ratio_c", rule="dual_clip"),
        trinity=TRINITY_LOSS,
    )
    """Dual-clip PPO: the largest probability ratio of tokens with negative advantages; null for no limit."""
    loss_agg_mode: LossAggMode | None = key(None, verl=_VERL_AGGREGATION, trinity=TRINITY_LOSS)
    """Aggregation of the token losses: over all tokens, over episodes' token means, or over a fixed length."""
    norm_adv_by_std: bool | None = key(None, wrong_for=_NOT_FOR_SFT, verl=_VERL_STD, trinity=TRINITY_LOSS)
    """Divide advantages by the group's standard deviation."""
    task_norm_patch: bool = key(
        False,
        unsupported=unsupported(
            True,
            why="it is no longer supported; norm_adv_by_std sets whether advantages are divided by the group's "
            "standard deviation",
        ),
    )
    """Older name for norm_adv_by_std over the whole batch; not supported."""
    use_kl_in_reward: bool = key(
        False,
        wrong_for=_ONLY_REWARDS,
        verl=sets("algorithm.use_kl_in_reward"),
        unsupported=unsupported(
            True,
            by=("trinity",),
            why="advantages are computed as soon as episodes end, and the trainer computes the starting model's "
            "logprobs later; write use_kl_loss: true",
        ),
    )
    """Subtract the estimated KL to the starting model from the reward."""
    kl_penalty: KlType = key(
        "k1",
        no_effect=(FOR_SFT, _NO_KL_IN_REWARD, when("algorithm.kl_coef", 0, section="trainer_common")),
        verl=mirrors("algorithm.kl_penalty"),
        trinity="for use_kl_in_reward, which this backbone does not support",
    )
    """Estimator of the KL in the reward."""
    kl_coef: Annotated[float, Field(ge=0, le=1000)] = key(
        0.001,
        no_effect=(FOR_SFT, _NO_KL_IN_REWARD),
        verl=mirrors("algorithm.kl_ctrl.kl_coef"),
        trinity="for use_kl_in_reward, which this backbone does not support",
    )
    """Coefficient of the KL in the reward."""
    dynamic_sampling: DynamicSampling | None = key(
        None,
        wrong_for=_NO_GROUPS,
        trainers="groups are left out before the trainer gets them",
        unsupported=unsupported(
            "refill",
            by=("trinity",),
            why="Trinity's explorer runs the tasks of a training step in one batch and cannot add further ones; "
            "use drop, --backbone=local or --backbone=verl",
        ),
    )
    """Groups whose rewards are all equal: none trains them, drop leaves them out, refill also runs further tasks."""
    max_refills: PositiveInt = key(
        3,
        no_effect=(only("refill").unless("trainer_common.algorithm.dynamic_sampling"),),
        trainers="bounds the batches of further tasks that astuner runs",
    )
    """refill: how often a step runs further tasks at most, each time as many as it has too few groups."""
    overlong_buffer_length: NonNegativeInt = key(
        0, wrong_for=_ONLY_REWARDS, trainers="subtracted from the reward before advantages are computed"
    )
    """DAPO's soft penalty: responses within this many tokens of max_response_length lose up to 1 reward; 0 is off."""
    entropy_coef: Annotated[float, Field(ge=0, le=1000)] = key(
        0.0,
        wrong_for=_NOT_FOR_SFT,
        verl=mirrors("actor_rollout_ref.actor.entropy_coeff"),
        trinity=mirrors("algorithm.entropy_loss_fn", rule="entropy_loss")
        + mirrors("algorithm.entropy_loss_fn_args", rule="entropy_args"),
    )
    """Coefficient of the entropy bonus: the loss is reduced by this value times the policy's entropy."""
    high_entropy_share: Annotated[float, Field(gt=0, le=1)] = key(
        1.0,
        wrong_for=_NOT_FOR_SFT,
        verl="the policy loss of the other tokens is 0; another forward pass over each mini-batch finds them",
        unsupported=unsupported(
            by=("trinity",),
            why="its loss gets a part of a mini-batch at a time, and the share is of the whole mini-batch; use "
            "--backbone=local or --backbone=verl",
        ),
    )
    """Train only this share of a mini-batch's tokens, those with the highest entropy (0.2 in the paper); 1 is off."""
    mask_truncated_answers: bool = key(
        False, wrong_for=_NOT_FOR_SFT, trainers="episodes are left out before the trainer gets them"
    )
    """Do not train episodes with an answer that reached its length limit; their rewards still count in the group."""
    component_weights: dict[str, Annotated[float, Field(ge=-1e6, le=1e6)]] = key(
        {}, variant="gdpo", trainers="weights the components before advantages are computed"
    )
    """gdpo: the weights of the reward components, by name. Default: 1 for each whose name has no dot."""
    step_advantage_coef: Annotated[float, Field(ge=0, le=1000)] = key(
        1.0, variant="gigpo", trainers="weights the advantages of steps before the trainer gets them"
    )
    """gigpo: the coefficient of a step's advantage over the other steps from the same state."""
    prompt_loss_weight: Annotated[float, Field(ge=0, le=1000)] = key(
        0.0, wrong_for=_ONLY_SFT, trainers="for sft, which this backbone does not support"
    )
    """sft: the weight of tokens that the assistant did not write (its own tokens have weight 1)."""

    @property
    def has_ratio(self) -> bool:
        """Whether the loss contains the ratio of the policy to the policy before the step."""
        reinforcement = ALGORITHMS[self.adv_estimator].reinforcement
        return reinforcement is not None and reinforcement.loss.has_ratio

    @property
    def selects_by_entropy(self) -> bool:
        """Whether only the tokens with the highest entropy are trained."""
        return self.high_entropy_share < 1


SELF = "self"
"""The teacher that is the model in training."""
TEACHER_KEY = "trainer_common.distillation.teacher"
"""The key that names the teacher, for messages."""


def is_server(teacher: str | None) -> bool:
    """Return whether a teacher is the address of a server."""
    return teacher is not None and teacher.startswith(("http://", "https://"))


_SERVER = Variant("unless {} is the URL of a server", is_server)


class DistillationConfig(Section):
    """`trainer_common.distillation`: on-policy distillation. The teacher scores the tokens that the model sampled."""

    chosen_by: ClassVar[str] = "teacher"

    teacher: str | None = key(
        None,
        unsupported=unsupported(
            SELF,
            by=("trinity",),
            why="its trainer has the model in other processes; name a folder or the address of a server, or use "
            "--backbone=local or --backbone=verl",
        ),
        resume="path",
    )
    """A model folder, the URL of a vLLM server, or self (the model in training, with a hint); null for no teacher."""
    teacher_model: str | None = key(None, variant=_SERVER, resume="any")
    """The name of the model on the teacher's server; null is the only model that it serves."""
    api_key_env: str | None = key(None, variant=_SERVER, resume="any")
    """Environment variable with the API key of the teacher's server."""
    request_timeout: Seconds = key(120.0, variant=_SERVER, resume="any")
    """Time limit of one request to the teacher's server, in seconds."""
    coef: Annotated[float, Field(gt=0, le=1000)] = key(1.0, variant=NOT_NULL)
    """Factor of log teacher - log model, minus its mean, which is added to each token's advantage."""
    reward_coef: Annotated[float, Field(ge=0, le=1000)] = key(0.0, variant=NOT_NULL)
    """Factor of the rewards' advantages; 0 learns from the teacher alone."""
    hint: str | None = key(None, variant=NOT_NULL)
    """Text for the teacher only, at the end of each request, with {reward}, {explanation} and the task's {fields}."""


def teacher_folder(config: DistillationConfig) -> str | None:
    """Return the teacher if it is a model to load; None for a server, the model in training, or no teacher."""
    teacher = config.teacher
    return None if teacher is None or teacher == SELF or is_server(teacher) else teacher
