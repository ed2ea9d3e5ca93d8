"""Trinity's metrics under astuner's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# Where Trinity's two trainers have other names, both.
_MEANS = {
    "loss/policy": ("actor/loss/policy",),
    "loss/kl": ("actor/loss/kl",),
    "loss/total": ("actor/loss/total",),
    "grad_norm": ("optim/grad_norm", "actor/grad_norm"),
    "lr": ("optim/lr", "actor/lr"),
}
_WAITED = "time/read_experience"
_TRAINED = "actor/ratio/trained_tokens"
_PER_TOKEN = {
    "kl/update": ("actor/ratio/kl_sum",),
    "ratio/mean": ("actor/ratio/ratio_sum",),
    "clip_fraction": ("actor/ratio/clipped_low", "actor/ratio/clipped_high"),
    "logprob_difference": ("actor/logprob_difference",),
}


def update_metrics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of a training step.

    Args:
        parts: what Trinity's trainer measured in each of its optimiser steps; sums over tokens, divided by a number
            of its own that is the same for all of a step, so that their quotients are means over tokens.
    """
    taught = [part for part in parts if part.get(_TRAINED)]
    metrics: dict[str, float] = {}
    for name, theirs in _MEANS.items():
        found = [part[one] for part in taught for one in theirs if one in part]
        if found:
            metrics[name] = sum(found) / len(found)
    trained = sum(part[_TRAINED] for part in taught)
    for name, sums in _PER_TOKEN.items():
        if trained:
            metrics[name] = sum(part.get(one, 0.0) for part in taught for one in sums) / trained
    ages = [part["staleness/max"] for part in parts if "staleness/max" in part]
    means = [part["staleness/mean"] for part in parts if "staleness/mean" in part]
    if ages:
        metrics |= {"staleness/max": max(ages), "staleness/mean": sum(means) / len(means)}
    waits = [part[_WAITED] for part in parts if _WAITED in part]
    if waits:
        metrics["time/trainer_wait"] = sum(waits)
    return metrics | {"update/optimiser_steps": len(taught)}
