"""What arrives at Trinity's trainer is compared with the record: tokens, masks, logprobs, and that all arrives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from astuner.backbone.trinity.certificate import digest, refuse_other, sample_digest
from astuner.errors import BackboneError
from astuner.schema import CallSpan, Episode, Sample, Task

SAMPLE = Sample(
    token_ids=(5, 6, 7, 8),
    loss_mask=(0, 0, 1, 1),
    logprobs=(0.0, 0.0, -0.5, -0.25),
    position_ids=(0, 1, 2, 3),
    spans=(CallSpan("c", 2, 4),),
    weight=1.0,
)
EPISODES = [Episode("e", Task("t", "?"), 0, "ok", 1.0, True, samples=(SAMPLE, replace(SAMPLE, token_ids=(5, 6, 7, 9))))]
BOTH = {("e", number): sample_digest(sample) for number, sample in enumerate(EPISODES[0].samples)}


def test_what_was_recorded_passes_as_a_whole_or_in_part() -> None:
    refuse_other(EPISODES, BOTH.keys(), BOTH, 1)
    refuse_other(EPISODES, [("e", 1)], {("e", 1): BOTH["e", 1]}, 1)
    refuse_other(EPISODES, [], {}, 1)


@pytest.mark.parametrize(
    "arrived",
    [
        digest([5, 6, 7, 1], [True, True], [-0.5, -0.25]),
        digest([5, 6, 7, 8], [True, False], [-0.5, -0.25]),
        digest([5, 6, 7, 8], [True, True], [-0.5, -0.2500001]),
        digest([5, 6, 7], [True, True], [-0.5, -0.25]),
    ],
)
def test_a_changed_token_mask_or_logprob_ends_the_run(arrived: str) -> None:
    assert digest([5, 6, 7, 8], [True, True], [-0.5, -0.25]) == BOTH["e", 0]
    with pytest.raises(
        BackboneError, match="step 3: Trinity trained on sample 0 of episode e, and it is not what was "
    ):
        refuse_other(EPISODES, [("e", 0)], {("e", 0): arrived}, 3)


def test_a_sample_of_nobody_ends_the_run() -> None:
    with pytest.raises(BackboneError, match="trained on sample 0 of episode other"):
        refuse_other(EPISODES, [], {("other", 0): BOTH["e", 0]}, 1)


def test_a_sample_that_does_not_arrive_ends_the_run() -> None:
    with pytest.raises(BackboneError, match=r"step 2: Trinity trained 1 of 2 samples; sample 1 of episode e got lost"):
        refuse_other(EPISODES, BOTH.keys(), {("e", 0): BOTH["e", 0]}, 2)
