"""Checks of an update, each with the fault and without, and the cause of a difference between logprobs."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from astuner.config.loading import with_values
from astuner.config.root import RunConfig
from astuner.diagnostics.logprob_gap import explain_logprob_gap
from astuner.diagnostics.monitor import checks_of
from astuner.run_record.updates import SampleUpdate
from tests.diagnostics.conftest import Evidence, found


def test_an_ordinary_update_has_no_finding(evidence: Evidence):
    update = evidence.update(evidence.ordinary())
    assert {check.name: list(check.find(update)) for check in checks_of("update")} == {
        check.name: [] for check in checks_of("update")
    }


@pytest.mark.parametrize("scheduler", ["cosine", "linear"])
def test_a_schedule_may_end_at_0(evidence: Evidence, scheduler: str):
    at_zero = evidence.update(evidence.ordinary(), metrics={"lr": 0.0, "grad_norm": 0.1})
    start = at_zero.rollout.start

    def found_in(step: int, **optim: Any) -> bool:
        config = with_values(
            RunConfig(astuner=start.config),
            {f"astuner.trainer_common.optim.{name}": value for name, value in optim.items()},
        ).astuner
        rollout = replace(at_zero.rollout, step=step, start=replace(start, config=config))
        return bool(found("learning_rate_is_zero", replace(at_zero, rollout=rollout)))

    assert not found_in(3, lr_scheduler=scheduler)
    assert found_in(1, lr_scheduler=scheduler)
    assert found_in(3, lr_scheduler=scheduler, min_lr_ratio=0.1)
    assert found_in(3, lr_scheduler="constant")


@pytest.mark.parametrize(
    ("check", "metrics"),
    [
        ("learning_rate_is_zero", {"lr": 0.0, "grad_norm": 0.1}),
        ("no_gradient", {"lr": 1e-6, "grad_norm": 0.0}),
        ("weights_unchanged", {"lr": 1e-6, "grad_norm": 0.1, "update/changed_weights": 0.0}),
    ],
)
def test_an_update_without_effect(evidence: Evidence, check: str, metrics: dict[str, float]):
    assert found(check, evidence.update(evidence.ordinary(), metrics=metrics))
    assert found(check, evidence.update(evidence.ordinary(), metrics={})) == []


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"effective_sample_size": 0.6}, "effective sample size of the importance ratios is 60%"),
        ({"masked": 0.9}, "leaves out 90% of the tokens"),
        ({"truncated": 0.2}, "20% of the importance weights are truncated"),
    ],
)
def test_a_correction_that_discards_much_of_the_step(evidence: Evidence, metrics: dict[str, float], words: str):
    ordinary = {"effective_sample_size": 0.99, "masked": 0.02, "truncated": 0.01, "gap_mean": 0.04}

    def finding(values: dict[str, float], **common: Any) -> list[tuple[str, str]]:
        named = {f"correction/{name}": value for name, value in values.items()}
        update = evidence.update(evidence.ordinary(), metrics=named)
        start = evidence.start(config={"model": {"path": evidence.model}, "trainer_common": common})
        return found(
            "sampler_mismatch", replace(update, rollout=replace(update.rollout, start=start), dtype="bfloat16")
        )

    assert finding(ordinary) == []
    ((text, fix),) = finding(ordinary | metrics)
    assert words in text
    assert "differ by 0.04 nats" in text
    assert fix == "set model.dtype: float32"
    ((_, fix),) = finding(ordinary | metrics, correction={"mode": "geo_rs"})
    assert "correction.mode is geo_rs: raise its bounds" in fix


def test_stale_tokens_that_the_correction_discards(evidence: Evidence):
    fresh = {"effective_sample_size": 0.99, "masked": 0.02, "truncated": 0.01, "gap_mean": 0.04}
    metrics = {f"correction/{name}{end}": value for name, value in fresh.items() for end in ("", "/stale_0")}
    metrics |= {f"correction/{name}/stale_{age}": value for name, value in fresh.items() for age in (1, 2, 3)}
    update = evidence.update(evidence.ordinary(), metrics=metrics)
    start = evidence.start(config={"model": {"path": evidence.model}, "backbone": "trinity"})
    update = replace(update, rollout=replace(update.rollout, start=start), dtype=None)
    assert found("sampler_mismatch", update) == []
    bad = metrics | {"correction/effective_sample_size/stale_2": 0.5, "correction/truncated/stale_3": 0.4}
    ((text, fix),) = found("sampler_mismatch", replace(update, metrics=bad))
    assert "of the tokens that are 2 steps stale, the effective sample size of the importance ratios is 50%" in text
    assert fix == "set asynchrony.max_staleness: 1"


def test_advantages_of_other_episodes(evidence: Evidence):
    episodes = evidence.ordinary()
    update = evidence.update(episodes)
    names = [episode.episode_id for episode in episodes]
    moved = dict(zip(names, [update.advantages[name] for name in (*names[1:], names[0])], strict=True))
    ((message, _),) = found("advantages_contradict_rewards", replace(update, advantages=moved))
    assert "contradict their rewards" in message
    # Of samples that the trainer has lost, it has no advantages.
    assert found("advantages_contradict_rewards", replace(update, samples={}, advantages=moved)) == []
    scaled = {name: 3.7 * value for name, value in update.advantages.items()}
    samples = {
        name: [replace(s, advantages=((s.advantages[0][0], scaled[name]),)) for s in of_episode]
        for name, of_episode in update.samples.items()
    }
    assert found("advantages_contradict_rewards", replace(update, samples=samples, advantages=scaled)) == []


@pytest.mark.parametrize("algorithm", ["gdpo", "opo"])
def test_advantages_that_need_not_have_the_sign_and_order_of_the_rewards(evidence: Evidence, algorithm: str):
    update = evidence.update(evidence.ordinary())
    start = update.rollout.start
    config = with_values(
        RunConfig(astuner=start.config), {"astuner.trainer_common.algorithm.adv_estimator": algorithm}
    ).astuner
    rollout = replace(update.rollout, start=replace(start, config=config))
    moved = {name: -value for name, value in update.advantages.items()}
    assert found("advantages_contradict_rewards", replace(update, advantages=moved))
    assert found("advantages_contradict_rewards", replace(update, advantages=moved, rollout=rollout)) == []


def test_samples_trained_with_another_advantage(evidence: Evidence):
    update = evidence.update(evidence.ordinary())
    other = {
        name: [replace(s, advantages=((s.advantages[0][0], 9.0),)) for s in samples]
        for name, samples in update.samples.items()
    }
    assert found("advantages_contradict_rewards", replace(update, samples=other))


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_trainer_whose_mask_is_off_by_one(evidence: Evidence, shift: int):
    update = evidence.update(evidence.ordinary())

    def shifted(sample: SampleUpdate) -> SampleUpdate:
        assert sample.logprobs is not None
        values = sample.logprobs
        return replace(sample, logprobs=(*values[1:], -2.0) if shift == 1 else (-2.0, *values[:-1]))

    samples = {name: list(map(shifted, s)) for name, s in update.samples.items()}
    ((message, _),) = found("mask_off_by_one", replace(update, samples=samples))
    assert "off by one" in message
    shorter = {
        name: [replace(s[0], logprobs=s[0].logprobs[:-1])] for name, s in update.samples.items() if s[0].logprobs
    }
    assert "a different number of tokens" in found("mask_off_by_one", replace(update, samples=shorter))[0][0]


@pytest.mark.parametrize(
    ("gap", "dtype", "earlier", "alarm"),
    [
        (1e-5, "float32", (), False),
        (2e-3, "float32", (), True),
        (5e-4, "float32", (1e-6, 2e-6), True),
        (4e-5, "float32", (1e-7, 2e-7), False),
        (8e-5, "float32", (1e-7,), True),  # a prefix cache that is kept after a small update
        (2e-4, "float32", (1e-7, 8e-5), True),
        (0.05, "bfloat16", (), False),
        (0.2, "bfloat16", (), True),
        (0.2, None, (1e-3,), False),
    ],
)
def test_a_difference_that_rounding_does_not_explain(
    evidence: Evidence, gap: float, dtype: str | None, earlier: tuple[float, ...], alarm: bool
):
    update = evidence.update(evidence.ordinary(), metrics={"logprob_difference": gap}, dtype=dtype, gaps=earlier)
    assert bool(found("logprob_gap", update)) == alarm


def sampled(seed: int, change: Any, samples: int = 12, tokens: int = 40) -> list[tuple[list[float], list[float]]]:
    """Pairs of the sampler's and the trainer's logprobs, where `change` makes the first of the second."""
    rng = random.Random(seed)
    pairs = []
    for number in range(samples):
        trainer = [-rng.expovariate(1.0) for _ in range(tokens)]
        pairs.append(([change(number, place, value, rng, trainer) for place, value in enumerate(trainer)], trainer))
    return pairs


@pytest.mark.parametrize("seed", range(5))
def test_the_cause_of_a_difference(seed: int):
    shift = sampled(seed, lambda n, i, v, rng, trainer: trainer[i - 1])
    assert "off by one" in explain_logprob_gap(shift, 1.0).text
    one_prompt = sampled(seed, lambda n, i, v, rng, trainer: -rng.expovariate(1.0) if n == 3 else v)
    assert "only in 1 of 12 samples" in explain_logprob_gap(one_prompt, 0.1).text
    scaled = sampled(seed, lambda n, i, v, rng, trainer: 1.4 * v + 0.2 + rng.gauss(0, 0.05))
    assert "different temperatures (the sampler's is lower)" in explain_logprob_gap(scaled, 0.3).text
    noise = sampled(seed, lambda n, i, v, rng, trainer: v + rng.gauss(0, 0.1))
    assert "stale weights" in explain_logprob_gap(noise, 0.08, earlier=(1e-6, 2e-6)).text
    assert "other weights than the trained ones" in explain_logprob_gap(noise, 0.08).text
    assert "other weights than the trained ones" in explain_logprob_gap([], float("nan")).text
