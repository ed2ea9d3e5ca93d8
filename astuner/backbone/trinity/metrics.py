"""Maps Trinity's metrics to astuner's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from astuner.algorithms.correction import CORRECTION_SUMS, correction_summary
from astuner.algorithms.credit_assignment import check_logprob_gap
from astuner.backbone.packing.row_bins import UpdateTokens

# Trinity's Tinker trainer and its verl trainer use different names for some metrics.
_MEANS = {
    "loss/policy": ("actor/loss/policy",),
    "loss/kl": ("actor/loss/kl",),
    "loss/total": ("actor/loss/total",),
    "grad_norm": ("optim/grad_norm", "actor/grad_norm"),
    "lr": ("optim/lr", "actor/lr"),
}
_ENTROPY, _BONUS = "actor/entropy", "actor/loss/entropy_bonus"
_READ_TIME = "time/read_experience"
_TRAINED_TOKENS = "actor/ratio/trained_tokens"
_COMPUTED = "actor/computed_tokens"
DISTINCT_TOKENS = "actor/distinct_tokens"
"""Number of distinct prefixes of the rows of an optimizer step; with verl's workers only."""
_PER_TOKEN = {
    "kl/update": ("actor/ratio/kl_sum",),
    "ratio/mean": ("actor/ratio/ratio_sum",),
    "clip_fraction": ("actor/ratio/clipped_low", "actor/ratio/clipped_high"),
    "logprob_difference": ("actor/logprob_difference",),
}


def update_metrics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of a training step.

    Args:
        parts: Trinity's metrics of each optimizer step. Sums over tokens are divided by the same number for a whole
            step, so that their quotients are means over tokens.
    """
    updates = [part for part in parts if part.get(_TRAINED_TOKENS)]
    metrics: dict[str, float] = {}
    for name, trinity_names in _MEANS.items():
        values = [part[key] for part in updates for key in trinity_names if key in part]
        if values:
            metrics[name] = sum(values) / len(values)
    trained = sum(part[_TRAINED_TOKENS] for part in updates)
    for name, sums in _PER_TOKEN.items():
        if trained:
            metrics[name] = sum(part.get(key, 0.0) for part in updates for key in sums) / trained
    if trained and any(_BONUS in part for part in updates):
        metrics["entropy"] = sum(part.get(_ENTROPY, 0.0) for part in updates) / trained
        # `loss/total` is measured before Trinity subtracts the bonus.
        metrics["loss/total"] -= sum(part.get(_BONUS, 0.0) for part in updates) / len(updates)
    if trained:
        metrics["ratio/max"] = max(part.get("actor/ratio/ratio_max", 0.0) for part in updates)
        metrics |= _correction_metrics(updates, "", "")
    tokens = UpdateTokens(*(int(sum(part.get(key, 0.0) for part in updates)) for key in (_COMPUTED, DISTINCT_TOKENS)))
    if tokens.distinct:
        metrics |= tokens.metrics()
    age = 0
    while any(f"actor/correction/stale_{age}/tokens" in part for part in updates):
        metrics |= _correction_metrics(updates, f"stale_{age}/", f"/stale_{age}")
        age += 1
    stalest = [part["staleness/max"] for part in parts if "staleness/max" in part]
    means = [part["staleness/mean"] for part in parts if "staleness/mean" in part]
    if stalest:
        metrics |= {"staleness/max": max(stalest), "staleness/mean": sum(means) / len(means)}
    read_times = [part[_READ_TIME] for part in parts if _READ_TIME in part]
    if read_times:
        metrics["time/trainer_wait"] = sum(read_times)
    return metrics | {"update/optimiser_steps": len(updates)}


def _correction_metrics(updates: Sequence[Mapping[str, float]], group: str, suffix: str) -> dict[str, float]:
    """Return the correction metrics for a group of tokens; none if the group has no token."""
    columns = {name: [part.get(f"actor/correction/{group}{name}", 0.0) for part in updates] for name in CORRECTION_SUMS}
    sums = {name: max(column) if name == "gap_max" else sum(column) for name, column in columns.items()}
    return correction_summary(sums, suffix) if sums["tokens"] else {}


def check_current_weights(parts: Sequence[Mapping[str, float]], dtype: torch.dtype, step: int) -> None:
    """Check that the explorer sampled with the trainer's weights, if it should have.

    Trinity hands weights over between its own processes. The first optimizer step of a training step computes the
    logprobs of its samples with the weights that samples without staleness come from, so that the two agree. The
    weights of staler samples differ by design. If a step has some, only its calls without staleness are compared.

    Args:
        parts: Trinity's metrics of each optimizer step.
        dtype: the dtype that the model computes in.
        step: the training step.

    Raises:
        LogprobGapError: their logprobs differ by more than rounding.
    """
    first = parts[0] if parts else {}
    if first.get("staleness/max", 1.0) == 0.0:
        tokens, gap = first.get(_TRAINED_TOKENS), first.get("actor/logprob_difference")
    else:
        tokens, gap = (first.get(f"actor/correction/stale_0/{name}") for name in ("tokens", "gap_sum"))
    if tokens and gap is not None:
        check_logprob_gap(gap / tokens, dtype, f"step {step}, Trinity's explorer after the weight sync")
