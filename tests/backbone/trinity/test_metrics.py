"""Mapping of Trinity's metrics to astuner's names."""

from __future__ import annotations

import pytest
import torch

from astuner.algorithms.correction import CORRECTION_SUMS
from astuner.backbone.trinity.metrics import check_current_weights, update_metrics
from astuner.errors import LogprobGapError


def test_step_metrics_combine_those_of_its_optimizer_steps():
    taught = {"actor/ratio/trained_tokens": 4.0, "actor/loss/policy": 1.0, "actor/ratio/kl_sum": 2.0}
    taught |= {"actor/ratio/ratio_max": 3.0}
    idle = {"actor/loss/policy": 9.0, "time/read_experience": 3.0, "staleness/max": 2.0, "staleness/mean": 2.0}
    fresh = {"time/read_experience": 0.5, "staleness/max": 1.0, "staleness/mean": 1.0}
    other = {"actor/ratio/trained_tokens": 2.0, "actor/loss/policy": 3.0, "actor/ratio/kl_sum": 1.0}
    # The correction's sums, over 4 and 2 tokens.
    sums = dict(zip(CORRECTION_SUMS, [4.0, 2.0, 0.9, 4.0, 5.0, 1.0, 0.0], strict=True))
    taught |= {f"actor/correction/{name}": value for name, value in sums.items()}
    # One of the 4 tokens is two steps stale, and none is one step stale.
    for age, tokens in enumerate([3.0, 0.0, 1.0]):
        taught |= {f"actor/correction/stale_{age}/{name}": value * tokens / 4 for name, value in sums.items()}
    sums = dict(zip(CORRECTION_SUMS, [2.0, 1.0, 1.5, 2.0, 3.0, 0.0, 0.0], strict=True))
    other |= {f"actor/correction/{name}": value for name, value in sums.items()}
    metrics = update_metrics([taught | fresh, idle, other])
    assert metrics == pytest.approx(
        {
            "loss/policy": 2.0,
            "kl/update": 0.5,
            "ratio/mean": 0.0,
            "clip_fraction": 0.0,
            "logprob_difference": 0.0,
            "ratio/max": 3.0,
            "correction/gap_mean": 0.5,
            "correction/gap_max": 1.5,
            "correction/effective_sample_size": 36 / (6 * 8),
            "correction/truncated": 1 / 6,
            "correction/masked": 0.0,
            "correction/gap_mean/stale_0": 0.5,
            "correction/gap_max/stale_0": 0.9 * 3 / 4,
            "correction/effective_sample_size/stale_0": 16 / (4 * 5),
            "correction/truncated/stale_0": 1 / 4,
            "correction/masked/stale_0": 0.0,
            "correction/gap_mean/stale_2": 0.5,
            "correction/gap_max/stale_2": 0.9 / 4,
            "correction/effective_sample_size/stale_2": 16 / (4 * 5),
            "correction/truncated/stale_2": 1 / 4,
            "correction/masked/stale_2": 0.0,
            "staleness/max": 2.0,
            "staleness/mean": 1.5,
            "time/trainer_wait": 3.5,
            "update/optimiser_steps": 2,
        }
    )


def test_samples_of_other_weights_stop_the_run_unless_they_are_stale():
    fresh = {"actor/ratio/trained_tokens": 4.0, "actor/logprob_difference": 4e-4, "staleness/max": 0.0}
    wrong = fresh | {"actor/logprob_difference": 0.4}
    check_current_weights([fresh, wrong], torch.float32, 3)  # the weights move between optimizer steps
    check_current_weights([wrong | {"staleness/max": 1.0}], torch.float32, 3)
    check_current_weights([wrong], torch.bfloat16, 3)
    check_current_weights([{"staleness/max": 0.0}], torch.float32, 3)
    with pytest.raises(LogprobGapError, match=r"step 3, Trinity's explorer after the weight sync: the .* 0.1 "):
        check_current_weights([wrong], torch.float32, 3)
    # Of a step with stale samples, the calls that were sampled with the current weights are compared.
    mixed = wrong | {"staleness/max": 1.0, "actor/correction/stale_0/tokens": 2.0}
    check_current_weights([mixed | {"actor/correction/stale_0/gap_sum": 2e-4}], torch.float32, 3)
    check_current_weights(
        [mixed | {"actor/correction/stale_0/tokens": 0.0, "actor/correction/stale_0/gap_sum": 0.0}], torch.float32, 3
    )
    with pytest.raises(LogprobGapError, match=r"step 3, Trinity's explorer after the weight sync: the .* 0.1 "):
        check_current_weights([mixed | {"actor/correction/stale_0/gap_sum": 0.2}], torch.float32, 3)
