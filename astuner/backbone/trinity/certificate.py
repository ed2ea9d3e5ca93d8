"""Proof that what Trinity trains on is what the tracker recorded, byte for byte.

Experiences go through several processes and formats before they are trained. What arrives there is compared with the
samples in the run record, in every step: tokens, which of them are trained, and the logprobs they were sampled with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from astuner.backbone.rows import prompt_length
from astuner.errors import BackboneError
from astuner.schema import Episode, Sample

SampleName = tuple[str, int]
"""An episode's id, and the number of a sample within it."""


def digest(token_ids: Sequence[int], trained: Sequence[bool], logprobs: Sequence[float]) -> str:
    """Return what stands for a sample: equal only where all of it is.

    Args:
        token_ids: N ids.
        trained: R, of the response, which begins with the first trained token.
        logprobs: R, as float32.
    """
    parts = (np.asarray(token_ids, np.int64), np.asarray(trained, bool), np.asarray(logprobs, np.float32))
    hashed = hashlib.blake2b(digest_size=16)
    for part in parts:
        hashed.update(len(part).to_bytes(8, "little") + part.tobytes())
    return hashed.hexdigest()


def sample_digest(sample: Sample) -> str:
    """Return the digest of a tracker's sample."""
    start = prompt_length(sample)
    return digest(sample.token_ids, [count > 0 for count in sample.loss_mask[start:]], sample.logprobs[start:])


def refuse_other(
    episodes: Iterable[Episode], wanted: Collection[SampleName], trained: Mapping[SampleName, str], step: int
) -> None:
    """Compare what was trained in a step with what the tracker made of its episodes.

    Args:
        episodes: of the step, as recorded.
        wanted: the samples that have a gradient.
        trained: digests of those that arrived where they are trained.
        step: for the message.

    Raises:
        BackboneError: something else was trained, or not all.
    """
    missing = [name for name in wanted if name not in trained]
    if missing:
        raise BackboneError(
            f"step {step}: Trinity trained {len(wanted) - len(missing)} of {len(wanted)} samples; sample "
            f"{missing[0][1]} of episode {missing[0][0]} got lost on the way. This is a bug; please report it with "
            "the run"
        )
    known = {(one.episode_id, number): sample for one in episodes for number, sample in enumerate(one.samples)}
    for name, found in trained.items():
        if name not in known or sample_digest(known[name]) != found:
            raise BackboneError(
                f"step {step}: Trinity trained on sample {name[1]} of episode {name[0]}, and it is not what was "
                "recorded: tokens, mask or logprobs changed on the way. This is a bug; please report it with the run"
            )
