"""Corrections of the difference between the policy that samples and the policy that is trained, by name.

This table is the only declaration of a correction. The names that the configuration accepts, the checks and the table
in docs/en/algorithms.md are derived from it. `astuner.algorithms.correction` computes them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

Unit = Literal["token", "sequence"]
Statistic = Literal["geometric", "k3", "off_policy"]


@dataclass(frozen=True, slots=True)
class CorrectionSpec:
    """A correction. The sampler is the policy μ, the trainer before the update is π_old, and r = π_old / μ of a token.

    Attributes:
        source: the paper, and the name of verl's preset if there is one.
        formula: the factor of a token's loss, for the documentation.
        weights: the unit of the importance weights: r of the token, or the product of r over an LLM call; None for no
            weights.
        weight_range: the smallest and the largest weight.
        masks: whether weights out of this range become 0; otherwise, weights above the range become its maximum.
        rejects: the statistic by which calls are left out; None for none.
        rejection_range: the smallest and the largest value of the statistic of a call that is trained.
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
_GEOMETRIC = (0.999, 1.001)
_K3 = (0.0, 0.01)
_TOKEN_TIS = "min(r, 2)"
_SEQUENCE_TIS = "min(∏ r, 2)"
_GEOMETRIC_RS = "1 if the geometric mean of 1 / r is in [0.999, 1.001], else 0"
_K3_RS = "1 if the mean of r − 1 − log r is at most 0.01, else 0"

CORRECTIONS: Mapping[str, CorrectionSpec] = {
    "none": CorrectionSpec("", "1"),
    "token_tis": CorrectionSpec(f"{_TIS}; `decoupled_token_is`", _TOKEN_TIS, "token", (0.0, 2.0)),
    "seq_tis": CorrectionSpec(f"{_MIS}; `decoupled_seq_is`", _SEQUENCE_TIS, "sequence", (0.0, 2.0)),
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
    "geo_rs": CorrectionSpec(
        f"{_MIS}; `decoupled_geo_rs`", _GEOMETRIC_RS, rejects="geometric", rejection_range=_GEOMETRIC
    ),
    "geo_rs_token_tis": CorrectionSpec(
        "`decoupled_geo_rs_token_tis`",
        f"{_TOKEN_TIS}, times `geo_rs`",
        "token",
        (0.0, 2.0),
        rejects="geometric",
        rejection_range=_GEOMETRIC,
    ),
    "geo_rs_seq_tis": CorrectionSpec(
        "`decoupled_geo_rs_seq_tis`",
        f"{_SEQUENCE_TIS}, times `geo_rs`",
        "sequence",
        (0.0, 2.0),
        rejects="geometric",
        rejection_range=_GEOMETRIC,
    ),
    "k3_rs": CorrectionSpec(f"{_MIS}; `decoupled_k3_rs`", _K3_RS, rejects="k3", rejection_range=_K3),
    "k3_rs_token_tis": CorrectionSpec(
        "`decoupled_k3_rs_token_tis`",
        f"{_TOKEN_TIS}, times `k3_rs`",
        "token",
        (0.0, 2.0),
        rejects="k3",
        rejection_range=_K3,
    ),
    "k3_rs_seq_tis": CorrectionSpec(
        "`decoupled_k3_rs_seq_tis`",
        f"{_SEQUENCE_TIS}, times `k3_rs`",
        "sequence",
        (0.0, 2.0),
        rejects="k3",
        rejection_range=_K3,
    ),
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
