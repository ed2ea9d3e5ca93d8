"""Checks that Trinity trains exactly on the samples in the run record.

Experiences pass through several processes and formats before training. In every step, digests of what reaches the
trainer (token ids, mask and logprobs) are compared with the recorded samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from astuner.algorithms.training_rows import prompt_length
from astuner.backbone.trinity.events import SampleKey
from astuner.errors import BackboneError
from astuner.schema import Episode, Sample


def content_digest(token_ids: Sequence[int], is_trained: Sequence[bool], logprobs: Sequence[float]) -> str:
    """Return the BLAKE2 digest of a sample.

    Args:
        token_ids: N token ids.
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
    """Check that a step trained exactly the recorded samples.

    Args:
        episodes: the step's episodes as recorded.
        expected: the samples that have a gradient.
        trained: digests of the samples that reached the trainer.
        step: the training step, for the message.

    Raises:
        BackboneError: a sample is missing, differs or was not recorded.
    """
    missing = [key for key in expected if key not in trained]
    if missing:
        raise BackboneError(
            f"step {step}: Trinity trained only {len(expected) - len(missing)} of {len(expected)} samples; sample "
            f"{missing[0][1]} of episode {missing[0][0]} is missing. This is a bug; please report it with the run"
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
