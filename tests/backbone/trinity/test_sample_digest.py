"""Comparison of the samples that reach Trinity's trainer with the recorded ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from astuner.backbone.trinity.metrics import check_samples_match, content_digest, sample_digest
from astuner.errors import BackboneError
from astuner.schema import CallSpan, Episode, Sample, Task

SAMPLE = Sample(
    token_ids=(5, 6, 7, 8),
    train_counts=(0, 0, 1, 1),
    logprobs=(0.0, 0.0, -0.5, -0.25),
    position_ids=(0, 1, 2, 3),
    spans=(CallSpan("c", 2, 4),),
    weight=1.0,
)
EPISODES = [Episode("e", Task("t", "?"), 0, "ok", 1.0, True, samples=(SAMPLE, replace(SAMPLE, token_ids=(5, 6, 7, 9))))]
DIGESTS = {("e", number): sample_digest(sample) for number, sample in enumerate(EPISODES[0].samples)}


def test_recorded_samples_pass_in_full_or_in_part() -> None:
    check_samples_match(EPISODES, DIGESTS.keys(), DIGESTS, 1)
    check_samples_match(EPISODES, [("e", 1)], {("e", 1): DIGESTS["e", 1]}, 1)
    check_samples_match(EPISODES, [], {}, 1)


@pytest.mark.parametrize(
    "trained",
    [
        content_digest([5, 6, 7, 1], [True, True], [-0.5, -0.25]),
        content_digest([5, 6, 7, 8], [True, False], [-0.5, -0.25]),
        content_digest([5, 6, 7, 8], [True, True], [-0.5, -0.2500001]),
        content_digest([5, 6, 7], [True, True], [-0.5, -0.25]),
    ],
)
def test_changed_token_mask_or_logprob_is_an_error(trained: str) -> None:
    assert content_digest([5, 6, 7, 8], [True, True], [-0.5, -0.25]) == DIGESTS["e", 0]
    with pytest.raises(BackboneError, match="step 3: sample 0 of episode e, on which Trinity trained, differs"):
        check_samples_match(EPISODES, [("e", 0)], {("e", 0): trained}, 3)


def test_unknown_sample_is_an_error() -> None:
    with pytest.raises(BackboneError, match="sample 0 of episode other, on which Trinity trained"):
        check_samples_match(EPISODES, [], {("other", 0): DIGESTS["e", 0]}, 1)


def test_missing_sample_is_an_error() -> None:
    with pytest.raises(
        BackboneError, match=r"step 2: Trinity trained only 1 of 2 samples; sample 1 in episode e is missing"
    ):
        check_samples_match(EPISODES, DIGESTS.keys(), {("e", 0): DIGESTS["e", 0]}, 2)
