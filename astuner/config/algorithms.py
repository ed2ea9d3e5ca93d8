"""The algorithms by name: the choices and default values that each paper states.

This table is the only declaration of an algorithm. The names that the configuration accepts, the checks that depend on
the algorithm, verl's names for it and the table in docs/en/algorithms.md are all derived from it. The functions that it
names are in `astuner.algorithms`; they are looked up by name so that the configuration loads without PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

LossAggMode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
DynamicSampling = Literal["none", "drop", "refill"]
MiniBatchUnit = Literal["episode", "group"]


@dataclass(frozen=True, slots=True)
class AdvantageSpec:
    """An advantage estimator.

    Attributes:
        function: a function of `astuner.algorithms.advantages`.
        formula: the advantage of an episode, for the documentation.
        compares_group: True if it compares the episodes of one task with each other, and so needs more than one.
        verl_name: the nearest `algorithm.adv_estimator` of verl. verl checks it; astuner computes the advantages.
        by_component: whether each component of the reward is normalised separately.
        by_length: whether advantages depend on the lengths of the episodes.
        by_state: whether steps that begin in equal states are compared, too.
    """

    function: str
    formula: str
    compares_group: bool
    verl_name: str
    by_component: bool = False
    by_length: bool = False
    by_state: bool = False


@dataclass(frozen=True, slots=True)
class LossSpec:
    """A policy-gradient loss.

    Attributes:
        function: a function of `astuner.algorithms.policy_loss`.
        formula: the loss of a token, for the documentation.
        verl_name: the nearest `policy_loss.loss_mode` of verl. verl checks it; astuner computes the loss.
        by_call: whether all tokens of an answer share one advantage.
        has_ratio: whether the loss contains the ratio of the policy to the policy before the step.
    """

    function: str
    formula: str
    verl_name: str
    by_call: bool = False
    has_ratio: bool = True


@dataclass(frozen=True, slots=True)
class ReinforcementSpec:
    """The advantage estimator and the policy loss of an algorithm.

    Attributes:
        advantage: the advantage estimator.
        loss: the loss.
        norm_adv_by_std: whether advantages are divided by a standard deviation.
        clip: the distances `low` and `high` that the probability ratio may have from 1; None for a loss that clips no
            ratio.
        dynamic_sampling: the default of the key `dynamic_sampling`.
    """

    advantage: AdvantageSpec
    loss: LossSpec
    norm_adv_by_std: bool
    clip: tuple[float, float] | None
    dynamic_sampling: DynamicSampling = "none"


@dataclass(frozen=True, slots=True)
class AlgorithmSpec:
    """An algorithm as its paper states it.

    Attributes:
        citation: the paper, as "arXiv:NUMBER"; where a default is not the paper's, the source of the default.
        loss_agg_mode: how token losses become one number (see `astuner.algorithms.aggregate`).
        reinforcement: rewards to policy loss; None for supervised training.
    """

    citation: str
    loss_agg_mode: LossAggMode
    reinforcement: ReinforcementSpec | None


_GROUP_RELATIVE = AdvantageSpec("group_relative_advantages", "reward − group mean", True, "grpo")
_LEAVE_ONE_OUT = AdvantageSpec("leave_one_out_advantages", "reward − mean of the others in the group", True, "rloo")
_BATCH_NORMALISED = AdvantageSpec("batch_normalised_advantages", "reward − batch mean", False, "reinforce_plus_plus")

_GROUP_CENTRED = AdvantageSpec(
    "group_centred_advantages", "reward − group mean, divided by the batch std", True, "reinforce_plus_plus_baseline"
)
_LENGTH_WEIGHTED = AdvantageSpec(
    "length_weighted_advantages", "reward − group mean weighted by lengths", True, "opo", by_length=True
)
_MEAN_NORMALISED = AdvantageSpec("mean_normalised_advantages", "(reward − group mean) / group mean", True, "grpo")

_GROUP_DECOUPLED = AdvantageSpec(
    "group_decoupled_advantages",
    "sum of (component − group mean) / group std, divided by the batch std",
    True,
    "grpo",
    by_component=True,
)

_GROUP_IN_GROUP = AdvantageSpec(
    "group_relative_advantages",
    "reward − group mean, plus that of the returns from equal states",
    True,
    "grpo",
    by_state=True,
)

_CLIPPED_SURROGATE = LossSpec("clipped_surrogate_loss", "clipped ratio", "vanilla")
_SEQUENCE_CLIPPED = LossSpec("sequence_clipped_loss", "clipped ratio of the whole answer", "gspo", by_call=True)
_GEOMETRIC_MEAN = LossSpec(
    "geometric_mean_loss", "geometric mean of the answer's clipped ratios", "geo_mean", by_call=True
)
_TOKEN_SEQUENCE_CLIPPED = LossSpec(
    "token_sequence_clipped_loss", "clipped ratio of the whole answer, with the token's gradient", "gspo"
)
_SOFT_GATE = LossSpec("soft_gate_loss", "soft gate of the ratio", "sapo")
_CLIPPED_WEIGHT = LossSpec("clipped_weight_loss", "REINFORCE, weighted by the clipped ratio", "cispo")
_REINFORCE = LossSpec("reinforce_loss", "REINFORCE", "gpg", has_ratio=False)

# PPO's value (arXiv:1707.06347, section 6.1), for the papers that build on PPO's loss and state none.
_PPO_CLIP = (0.2, 0.2)

ALGORITHMS: Mapping[str, AlgorithmSpec] = {
    "grpo": AlgorithmSpec(
        "GRPO: DeepSeekMath, arXiv:2402.03300. It states no clip range; this is PPO's, 0.2.",
        "seq-mean-token-mean",
        ReinforcementSpec(_GROUP_RELATIVE, _CLIPPED_SURROGATE, norm_adv_by_std=True, clip=_PPO_CLIP),
    ),
    "dr_grpo": AlgorithmSpec(
        "Dr. GRPO: Understanding R1-Zero-Like Training, arXiv:2503.20783. The clip range is PPO's, 0.2.",
        "seq-mean-token-sum-norm",
        ReinforcementSpec(_GROUP_RELATIVE, _CLIPPED_SURROGATE, norm_adv_by_std=False, clip=_PPO_CLIP),
    ),
    "dapo": AlgorithmSpec(
        "DAPO: An Open-Source LLM Reinforcement Learning System at Scale, arXiv:2503.14476.",
        "token-mean",
        ReinforcementSpec(
            _GROUP_RELATIVE, _CLIPPED_SURROGATE, norm_adv_by_std=True, clip=(0.2, 0.28), dynamic_sampling="drop"
        ),
    ),
    "gdpo": AlgorithmSpec(
        "GDPO: Group reward-Decoupled Normalization Policy Optimization, arXiv:2601.05242. The clip range is PPO's.",
        "seq-mean-token-mean",
        ReinforcementSpec(_GROUP_DECOUPLED, _CLIPPED_SURROGATE, norm_adv_by_std=True, clip=_PPO_CLIP),
    ),
    "gigpo": AlgorithmSpec(
        "GiGPO: Group-in-Group Policy Optimization for LLM Agent Training, arXiv:2505.10978. The clip range is PPO's, "
        "0.2.",
        "seq-mean-token-mean",
        ReinforcementSpec(_GROUP_IN_GROUP, _CLIPPED_SURROGATE, norm_adv_by_std=True, clip=(0.2, 0.2)),
    ),
    "rloo": AlgorithmSpec(
        "RLOO: Back to Basics, arXiv:2402.14740. It sums over a response's tokens; here the sum is divided by the "
        "constant max_response_length.",
        "seq-mean-token-sum-norm",
        ReinforcementSpec(_LEAVE_ONE_OUT, _REINFORCE, norm_adv_by_std=False, clip=None),
    ),
    "opo": AlgorithmSpec(
        "OPO: On-Policy RL with Optimal Reward Baseline, arXiv:2505.23585. It sums over a response's tokens; here the "
        "sum is divided by the constant max_response_length.",
        "seq-mean-token-sum-norm",
        ReinforcementSpec(_LENGTH_WEIGHTED, _REINFORCE, norm_adv_by_std=False, clip=None),
    ),
    "reinforce++": AlgorithmSpec(
        "REINFORCE++, arXiv:2501.03262v9, the variant without a group baseline. The clip range is PPO's, 0.2, and so "
        "is the mean over time steps.",
        "token-mean",
        ReinforcementSpec(_BATCH_NORMALISED, _CLIPPED_SURROGATE, norm_adv_by_std=True, clip=_PPO_CLIP),
    ),
    "reinforce++_baseline": AlgorithmSpec(
        "REINFORCE++ with baseline, arXiv:2501.03262v9. The clip range is PPO's, 0.2, and so is the mean over time "
        "steps.",
        "token-mean",
        ReinforcementSpec(_GROUP_CENTRED, _CLIPPED_SURROGATE, norm_adv_by_std=True, clip=_PPO_CLIP),
    ),
    "maxrl": AlgorithmSpec(
        "MaxRL: Maximum Likelihood Reinforcement Learning, arXiv:2602.02710. The clip range is PPO's, 0.2.",
        "seq-mean-token-mean",
        ReinforcementSpec(_MEAN_NORMALISED, _CLIPPED_SURROGATE, norm_adv_by_std=False, clip=_PPO_CLIP),
    ),
    "gspo": AlgorithmSpec(
        "GSPO: Group Sequence Policy Optimization, arXiv:2507.18071.",
        "seq-mean-token-mean",
        ReinforcementSpec(_GROUP_RELATIVE, _SEQUENCE_CLIPPED, norm_adv_by_std=True, clip=(3e-4, 4e-4)),
    ),
    "gspo_token": AlgorithmSpec(
        "GSPO-token: Group Sequence Policy Optimization, arXiv:2507.18071, section 4.3.",
        "seq-mean-token-mean",
        ReinforcementSpec(_GROUP_RELATIVE, _TOKEN_SEQUENCE_CLIPPED, norm_adv_by_std=True, clip=(3e-4, 4e-4)),
    ),
    "gmpo": AlgorithmSpec(
        "GMPO: Geometric-Mean Policy Optimization, arXiv:2507.20673. The clip range is that of log r.",
        "seq-mean-token-mean",
        ReinforcementSpec(_GROUP_RELATIVE, _GEOMETRIC_MEAN, norm_adv_by_std=True, clip=(0.4, 0.4)),
    ),
    "sapo": AlgorithmSpec(
        "SAPO: Soft Adaptive Policy Optimization, arXiv:2511.20347.",
        "seq-mean-token-mean",
        ReinforcementSpec(_GROUP_RELATIVE, _SOFT_GATE, norm_adv_by_std=True, clip=None),
    ),
    "cispo": AlgorithmSpec(
        "CISPO: MiniMax-M1, arXiv:2506.13585. It has no lower bound and states no upper bound; weights are clipped at "
        "5, as in ScaleRL, arXiv:2510.13786.",
        "token-mean",
        ReinforcementSpec(_GROUP_RELATIVE, _CLIPPED_WEIGHT, norm_adv_by_std=True, clip=(1.0, 4.0)),
    ),
    "sft": AlgorithmSpec(
        "Supervised fine-tuning: token-level cross entropy; the weight of prompts is from arXiv:2401.13586.",
        "token-mean",
        None,
    ),
}

# mypy cannot evaluate a Literal of computed names; pydantic, which checks the value, can.
if TYPE_CHECKING:
    AlgorithmName = str
else:
    AlgorithmName = Literal[tuple(ALGORITHMS)]
