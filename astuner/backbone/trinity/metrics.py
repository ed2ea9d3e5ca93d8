"""Maps Trinity's metrics to astuner's names, and checks that Trinity trains exactly on the recorded samples.

Experiences pass through several processes and formats before training. In every step, digests of what reaches the
trainer (token ids, mask and logprobs) are compared with the recorded samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from astuner.algorithms.correction import CORRECTION_SUMS, correction_summary
from astuner.algorithms.credit_assignment import check_logprob_gap
from astuner.algorithms.training_rows import prompt_length
from astuner.backbone.packing.row_bins import UpdateTokens
from astuner.errors import BackboneError
from astuner.schema import Episode, Sample

if TYPE_CHECKING:
    from astuner.backbone.trinity.coordinator import SampleKey

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
"""Number of distinct prefixes in an optimizer step's rows; with verl's workers only."""
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
    columns = {name: [part.get(f"actor/correction/{group}{name}", 0.0) for part in updates] for name in CORRECTION_SUMS}
    sums = {name: max(column) if name == "gap_max" else sum(column) for name, column in columns.items()}
    return correction_summary(sums, suffix) if sums["tokens"] else {}


def check_current_weights(parts: Sequence[Mapping[str, float]], dtype: torch.dtype, step: int) -> None:
    """Check that the explorer sampled with the trainer's weights, if it should have.

    Trinity hands weights over between its own processes. A training step's first optimizer step computes its samples'
    logprobs with the weights that samples without staleness come from, so the two agree. The weights of staler samples
    differ by design. If a step has some, only its calls without staleness are compared.

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


def content_digest(token_ids: Sequence[int], is_trained: Sequence[bool], logprobs: Sequence[float]) -> str:
    """Return the BLAKE2 digest of a sample.

    Args:
        is_trained: mask over the R tokens of the response, which starts with the first trained token.
        logprobs: R log-probabilities, hashed as float32.
    """
    arrays = (np.asarray(token_ids, np.int64), np.asarray(is_trained, bool), np.asarray(logprobs, np.float32))
    hashed = hashlib.blake2b(digest_size=16)
    for array in arrays:
        hashed.update(len(array).to_bytes(8, "little") + array.tobytes())
    return hashed.hexdigest()


def sample_digest(sample: Sample) -> str:
    """Return the digest of a recorded sample."""
    start = prompt_length(sample)
    return content_digest(
        sample.token_ids, [count > 0 for count in sample.train_counts[start:]], sample.logprobs[start:]
    )


def check_samples_match(
    episodes: Iterable[Episode], expected: Collection[SampleKey], trained: Mapping[SampleKey, str], step: int
) -> None:
    """Raise BackboneError if a step trained other samples than the recorded ones.

    Of the recorded episodes, the `expected` samples have a gradient; `trained` has the digests of those that
    reached the trainer.
    """
    missing = [key for key in expected if key not in trained]
    if missing:
        raise BackboneError(
            f"step {step}: Trinity trained only {len(expected) - len(missing)} of {len(expected)} samples; sample "
            f"{missing[0][1]} in episode {missing[0][0]} is missing. This is a bug; please report it with the run"
        )
    samples = {
        (episode.episode_id, index): sample for episode in episodes for index, sample in enumerate(episode.samples)
    }
    for key, value in trained.items():
        if key not in samples or sample_digest(samples[key]) != value:
            raise BackboneError(
                f"step {step}: sample {key[1]} of episode {key[0]}, on which Trinity trained, differs from the run "
                "record in its tokens, mask or logprobs. This is a bug; please report it with the run"
            )
