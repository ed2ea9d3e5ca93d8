"""Write the tables of docs/en/algorithms.md: `python -m docs.algorithm_tables docs/en/algorithms.md`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from astuner.config.algorithms import ALGORITHMS
from astuner.config.corrections import CORRECTIONS
from astuner.config.keys import parts, schema
from docs.key_tables import table, update_page

_HEADER = (
    "`adv_estimator`",
    "advantage of an episode",
    "`norm_adv_by_std`",
    "loss of a token",
    "`clip_ratio_low`",
    "`clip_ratio_high`",
    "`loss_agg_mode`",
    "backbones",
    "paper",
)


def _rows() -> Iterator[tuple[str, ...]]:
    for name, spec in ALGORITHMS.items():
        rule = spec.reinforcement
        papers = re.findall(r"arXiv:(\d+\.\d+)", spec.citation)
        if not papers:
            raise ValueError(f"{name} in astuner/config/algorithms.py cites no paper; write arXiv:NUMBER")
        rules = schema().keys[parts("astuner.trainer_common.algorithm.adv_estimator")].unsupported
        missing = {backbone for rule in rules if name in (rule.values or ()) for backbone in rule.by}
        yield (
            f"`{name}`",
            "–" if rule is None else rule.advantage.formula,
            "–" if rule is None else str(rule.norm_adv_by_std).lower(),
            "cross entropy" if rule is None else rule.loss.formula,
            *(("–", "–") if rule is None or rule.clip is None else map(str, rule.clip)),
            f"`{spec.loss_agg_mode}`",
            ", ".join([backbone for backbone in ("local", "verl", "trinity") if backbone not in missing]),
            f"[{papers[0]}](https://arxiv.org/abs/{papers[0]})",
        )


PARTS = {
    "algorithms": lambda: table(_HEADER, _rows()),
    "corrections": lambda: table(
        ("`mode`", "factor of a token's loss", "source"),
        ((f"`{name}`", spec.formula, spec.source or "–") for name, spec in CORRECTIONS.items()),
    ),
}

if __name__ == "__main__":
    update_page(Path(sys.argv[1]), PARTS)
