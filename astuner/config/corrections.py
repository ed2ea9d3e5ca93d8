"""Corrections of the difference between the sampling and the trained policy, and `trainer_common.correction`.

The table `CORRECTIONS` is the only declaration of a correction. The names that the configuration accepts, the checks
and the table in docs/en/algorithms.md are derived from it. `astuner.algorithms.correction` computes them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from astuner.config.section import Section, Variant, key, mirrors

Unit = Literal["token", "sequence"]
Statistic = Literal["geometric", "k3", "off_policy"]


@dataclass(frozen=True, slots=True)
class CorrectionSpec:
    """A correction. The sampler is the policy μ, the trainer before the update is π_old, and r = π_old / μ of a token.

    Attributes:
        source: the paper, and the name of verl's preset if there is one.
        formula: the factor of a token's loss, for the documentation.
        weights: the unit of the importance weights: a token's r, or the product ∏ r over an LLM call; None for no
            weights.
        weight_range: the smallest and the largest weight.
        masks: whether weights out of this range become 0; otherwise, weights above the range become its maximum.
        rejects: the statistic by which calls are left out; None for none.
        rejection_range: the smallest and the largest value of the statistic with which a call is trained.
    """

    source: str
    formula: str
    weights: Unit | None = None
    weight_range: tuple[float, float] = (0.0, math.inf)
    masks: bool = False
    rejects: Statistic | None = None
    rejection_range: tuple[float, float] = (0.0, math.inf)


_TIS = "[Yao et al., 2025](https://fengyao.notion.site/off-policy-rl)"
_MIS = "[Liu et al., 2025](https://richardli.xyz/rl-collapse)"
_TOKEN_TIS = CorrectionSpec(f"{_TIS}; `decoupled_token_is`", "min(r, 2)", "token", (0.0, 2.0))
_SEQUENCE_TIS = CorrectionSpec(f"{_MIS}; `decoupled_seq_is`", "min(∏ r, 2)", "sequence", (0.0, 2.0))
_GEOMETRIC_RS = CorrectionSpec(
    f"{_MIS}; `decoupled_geo_rs`",
    "1 if the geometric mean of 1 / r is in [0.999, 1.001], else 0",
    rejects="geometric",
    rejection_range=(0.999, 1.001),
)
_K3_RS = CorrectionSpec(
    f"{_MIS}; `decoupled_k3_rs`",
    "1 if the mean of r − 1 − log r is at most 0.01, else 0",
    rejects="k3",
    rejection_range=(0.0, 0.01),
)


def _with_rejection(weights: CorrectionSpec, name: str, rejection: CorrectionSpec, verl_preset: str) -> CorrectionSpec:
    """Return the product of importance weights and the rejection with a name."""
    return replace(
        weights,
        source=f"`{verl_preset}`",
        formula=f"{weights.formula}, times `{name}`",
        rejects=rejection.rejects,
        rejection_range=rejection.rejection_range,
    )


CORRECTIONS: Mapping[str, CorrectionSpec] = {
    "none": CorrectionSpec("", "1"),
    "token_tis": _TOKEN_TIS,
    "seq_tis": _SEQUENCE_TIS,
    "token_mis": CorrectionSpec(
        f"{_MIS}; TRL's `token_mask`", "r if it is at most 2, else 0", "token", (0.0, 2.0), masks=True
    ),
    "seq_mis": CorrectionSpec(
        f"{_MIS}; `decoupled_seq_is_rs`", "∏ r if it is in [0.5, 2], else 0", "sequence", (0.5, 2.0), masks=True
    ),
    "icepop": CorrectionSpec(
        "IcePop, [2510.18855](https://arxiv.org/abs/2510.18855); `decoupled_token_icepop`",
        "r if it is in [0.5, 5], else 0",
        "token",
        (0.5, 5.0),
        masks=True,
    ),
    "geo_rs": _GEOMETRIC_RS,
    "geo_rs_token_tis": _with_rejection(_TOKEN_TIS, "geo_rs", _GEOMETRIC_RS, "decoupled_geo_rs_token_tis"),
    "geo_rs_seq_tis": _with_rejection(_SEQUENCE_TIS, "geo_rs", _GEOMETRIC_RS, "decoupled_geo_rs_seq_tis"),
    "k3_rs": _K3_RS,
    "k3_rs_token_tis": _with_rejection(_TOKEN_TIS, "k3_rs", _K3_RS, "decoupled_k3_rs_token_tis"),
    "k3_rs_seq_tis": _with_rejection(_SEQUENCE_TIS, "k3_rs", _K3_RS, "decoupled_k3_rs_seq_tis"),
    "off_policy_mask": CorrectionSpec(
        "DeepSeek-V3.2, [2512.02556](https://arxiv.org/abs/2512.02556); it states no bound, and 0.5 is TRL's",
        "0 if A < 0 and the mean of log(μ / π) is above 0.5, else 1",
        rejects="off_policy",
        rejection_range=(-math.inf, 0.5),
    ),
    "decoupled": CorrectionSpec(
        "decoupled PPO, [2110.00641](https://arxiv.org/abs/2110.00641), [2505.24298](https://arxiv.org/abs/2505.24298)",
        "r",
        "token",
    ),
}

# mypy cannot evaluate a Literal of computed names; pydantic, which checks the value, can.
if TYPE_CHECKING:
    CorrectionName = str
else:
    CorrectionName = Literal[("auto", *CORRECTIONS)]

_Bound = Annotated[float, Field(gt=0, le=1e9)]
_LOSS_ARGS = mirrors("algorithm.policy_loss_fn_args", rule="loss_args")
_VERL = "algorithm.rollout_correction"
_VERL_WEIGHTS = mirrors(f"{_VERL}.rollout_is", rule="correction_weights")
_VERL_WEIGHT_BOUNDS = mirrors(f"{_VERL}.rollout_is_threshold", rule="correction_weight_bounds")
_VERL_REJECTION = mirrors(f"{_VERL}.rollout_rs", rule="correction_rejection")
_VERL_REJECTION_BOUNDS = mirrors(f"{_VERL}.rollout_rs_threshold", rule="correction_rejection_bounds")
_VERL_BYPASS = mirrors(f"{_VERL}.bypass_mode", rule="correction_bypass")
_NAMED = Variant("while {} is auto", lambda mode: bool(mode != "auto"))
_WEIGHTS = Variant("while {} has no weights", lambda mode: CORRECTIONS[mode].weights is not None)
_MASKS = Variant("unless {} masks weights", lambda mode: CORRECTIONS[mode].masks)
_REJECTS = Variant("while {} leaves out no call", lambda mode: CORRECTIONS[mode].rejects is not None)
_GEOMETRIC_MEAN = Variant("unless {} is a geo_rs mode", lambda mode: CORRECTIONS[mode].rejects == "geometric")


class CorrectionConfig(Section):
    """`trainer_common.correction`. A null bound is the mode's default."""

    chosen_by: ClassVar[str] = "mode"

    mode: CorrectionName = key(
        "auto",
        verl=_VERL_WEIGHTS + _VERL_WEIGHT_BOUNDS + _VERL_REJECTION + _VERL_REJECTION_BOUNDS + _VERL_BYPASS,
        trinity=_LOSS_ARGS,
    )
    """The correction (see docs/en/algorithms.md); auto is token_tis where sampler and trainer can differ, else none."""
    old_logprobs: Literal["auto", "trainer", "sampler"] = key(
        "auto", verl=_VERL_BYPASS + _VERL_WEIGHTS, trinity=_LOSS_ARGS
    )
    """The denominator of the ratios: the trainer's logprobs before the update, or the sampler's."""
    max_weight: _Bound | None = key(None, variant=(_NAMED, _WEIGHTS), verl=_VERL_WEIGHT_BOUNDS, trinity=_LOSS_ARGS)
    """Truncate, or mask, importance weights above this value."""
    min_weight: _Bound | None = key(
        None, variant=(_NAMED, _WEIGHTS, _MASKS), verl=_VERL_WEIGHT_BOUNDS, trinity=_LOSS_ARGS
    )
    """Mask importance weights below this value (token_mis, seq_mis, icepop)."""
    max_rejection: _Bound | None = key(
        None, variant=(_NAMED, _REJECTS), verl=_VERL_REJECTION_BOUNDS, trinity=_LOSS_ARGS
    )
    """Leave out calls whose statistic is above this value (geo_rs*, k3_rs*, off_policy_mask)."""
    min_rejection: _Bound | None = key(
        None, variant=(_NAMED, _REJECTS, _GEOMETRIC_MEAN), verl=_VERL_REJECTION_BOUNDS, trinity=_LOSS_ARGS
    )
    """Leave out calls whose statistic is below this value (geo_rs*)."""

    @property
    def weight_range(self) -> tuple[float, float]:
        """The smallest and the largest importance weight of the mode."""
        spec = CORRECTIONS[self.mode]
        low, high = spec.weight_range
        return (
            low if self.min_weight is None or not spec.masks else self.min_weight,
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
