"""The most likely cause of a difference between the sampler's and the trainer's logprobs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

# Mean difference below which logprobs count as equal, nats per token.
_SMALLEST_SHIFT = 1e-2

TokenPairs = tuple[Sequence[float], Sequence[float]]
"""The logprobs of a sample's trained tokens: the sampler's and the trainer's, equally long, in order."""


@dataclass(frozen=True)
class GapCause:
    """A cause of different logprobs: the finding with the evidence, and what to change."""

    text: str
    fix: str


def explain_logprob_gap(samples: Iterable[TokenPairs], difference: float, *, earlier: Sequence[float] = ()) -> GapCause:
    """Return the most likely cause of a difference between the sampler's and the trainer's logprobs.

    Args:
        samples: the logprobs of each sample.
        difference: mean absolute difference, in nats per token.
        earlier: this difference in each earlier step.
    """
    pairs = [(s, t) for s, t in samples if len(s) == len(t) and len(s) > 0]
    start = f"the logprobs of the rollout and of the trainer differ by {difference:.3g} nats per token on average"
    if (shifted := off_by_one(pairs)) is not None:
        return shifted
    aligned = _mean_difference(pairs, 0)
    size = [sum(abs(a - b) for a, b in zip(s, t, strict=True)) / len(s) for s, t in pairs]
    few = [value for value in size if value > 5 * aligned / 2]
    rest = sorted(value for value in size if value <= 5 * aligned / 2)
    if few and rest and len(few) < len(size) / 3 and rest[len(rest) // 2] < aligned / 50:
        return GapCause(
            f"{start}, but only in {len(few)} of {len(size)} samples: these answers were sampled for another prompt, "
            "or with other weights",
            "turn off caches of answers in the engine, or in a proxy before it; check that all engines receive the "
            "weights",
        )
    slope, share = _scale(pairs)
    is_first = not any(value < difference / 5 for value in earlier)
    if share > (0.35 if is_first else 0.8) and abs(slope) > 0.03:
        comparison = "higher" if slope < 0 else "lower"
        return GapCause(
            f"{start}, in proportion to the logprob itself ({share:.0%} of the variance): the sampler's and the "
            f"trainer's logprobs have different temperatures (the sampler's is {comparison})",
            "make both use rollout.temperature: a server must return logprobs after temperature (vLLM: logprobs-mode "
            "processed_logprobs), and a proxy must not change the temperature",
        )
    if not is_first:
        return GapCause(
            f"{start}, and by {min(earlier):.2g} in an earlier step: the engine samples with stale weights, or with a "
            "key-value cache of stale weights",
            "check the transfer of weights to the engine (sync): adapters must be merged in, and the engine must clear "
            "its prefix cache afterwards",
        )
    return GapCause(
        f"{start}: the engine may have sampled with other weights than the trained ones, at another temperature, with "
        "another tokenizer or chat template, or in another precision",
        "set model.dtype: float32; if the difference remains, check that the engine serves the model of model.path and "
        "returns logprobs at rollout.temperature (vLLM: logprobs-mode processed_logprobs), and report a bug",
    )


def off_by_one(samples: Sequence[TokenPairs]) -> GapCause | None:
    """Return the finding for logprobs that agree only after a shift by one token; None for other logprobs."""
    pairs = [(s, t) for s, t in samples if len(s) == len(t) and len(s) > 1]
    aligned = _mean_difference(pairs, 0)
    shifted = min(_mean_difference(pairs, -1), _mean_difference(pairs, 1))
    # Different weights change the logprobs, but do not shift them.
    if not (pairs and aligned > _SMALLEST_SHIFT and shifted < aligned / 5):
        return None
    return GapCause(
        f"the trainer's logprobs of the trained tokens differ from the sampler's by {aligned:.3g} nats per token, but "
        f"by {shifted:.2g} if they are shifted by one token: the loss mask, or the logprobs, are off by one",
        "this is a bug in the building of training rows: logits at position i belong to token i + 1; remove extensions "
        "that change masks, rows or logprobs, and report the bug",
    )


def _mean_difference(pairs: Sequence[TokenPairs], shift: int) -> float:
    """Return the mean absolute difference of the sampler's logprob i and the trainer's i + shift."""
    total, count = 0.0, 0
    for pair in pairs:
        sampler, trainer = (np.asarray(values, float) for values in pair)
        size = len(sampler) - abs(shift)
        with np.errstate(invalid="ignore"):  # logprobs may be infinite
            difference = sampler[max(-shift, 0) :][:size] - trainer[max(shift, 0) :][:size]
        total += float(np.abs(difference).sum())
        count += size
    return total / count if count else math.inf


def _scale(pairs: Sequence[TokenPairs]) -> tuple[float, float]:
    """Fit difference = a + b × trainer's logprob; return b and the share of the variance that it explains."""
    xs = [value for _, trainer in pairs for value in trainer]
    ys = [a - b for sampler, trainer in pairs for a, b in zip(sampler, trainer, strict=True)]
    if len(xs) < 3:
        return 0.0, 0.0
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    xx = sum((x - mean_x) ** 2 for x in xs)
    yy = sum((y - mean_y) ** 2 for y in ys)
    xy = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    if not xx or not yy:
        return 0.0, 0.0
    return xy / xx, xy * xy / (xx * yy)
