"""Trinity's trainer gets the tokens and gradients of the local backbone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from astuner.algorithms.correction import resolve_correction
from astuner.algorithms.distillation.distiller import Distiller
from astuner.algorithms.registry import resolve
from astuner.config.algorithms import ALGORITHMS
from astuner.config.loading import with_values
from astuner.config.root import RunConfig
from astuner.schema import Episode
from tests.backbone.verl.clusters import TOTAL_STEPS, make_episodes, small_run
from tests.backbone.verl.local_reference import Weights, local_reference

pytestmark = pytest.mark.trinity

UPDATES = 2


def experiences_of(episodes: list[Episode], step: int) -> list[Any]:
    """Return an episode's experiences after Trinity has sent them from a runner to its pipeline."""
    from trinity.common.experience import Experience

    from astuner.backbone.trinity.advantage_fn import experiences

    exps = [exp for index, episode in enumerate(episodes) for exp in experiences(episode, step, index // 3)]
    for exp in exps:  # set by the runner
        exp.info |= {"model_version": 0, "use_count": 0}
    return Experience.deserialize_many(Experience.serialize_many(exps))


def mini_batches_of(
    config: RunConfig,
    episodes: list[Episode],
    updates: int = UPDATES,
    step: int = 1,
    distiller: Distiller | None = None,
) -> list[list[Any]]:
    """Return the mini-batches that Trinity's trainer reads from its buffer."""
    from trinity.common.experience import Experience

    from astuner.backbone.trinity.advantage_fn import (
        EPISODE,
        MINI_BATCH_SIZE,
        SAMPLE,
        assign_mini_batches,
        mini_batch,
        padding_experience,
    )

    run = config.astuner
    algorithm = resolve(run.trainer_common.algorithm)
    exps = experiences_of(episodes, step)
    by_key = {(exp.info[EPISODE], exp.info[SAMPLE]): exp for exp in exps}
    _, row_batches = assign_mini_batches(run, updates, step, episodes, distiller)
    batches = [
        mini_batch(run, algorithm, rows, episodes, by_key) or [padding_experience(step, exps[0], use_reference=True)]
        for rows in row_batches
    ]
    assert all(exp.info[MINI_BATCH_SIZE] == len(batch) for batch in batches for exp in batch)
    return [Experience.deserialize_many(Experience.serialize_many(batch)) for batch in batches]


def tinker_trainer_step(config: RunConfig, model: Path, batches: list[list[Any]]) -> tuple[Weights, dict[str, float]]:
    """Update a model as Trinity's Tinker trainer does: its code computes the loss, the service only the gradients.

    Returns:
        The new weights, and the metrics of the step.
    """
    from trinity.algorithm.entropy_loss_fn.entropy_loss_fn import DummyEntropyLossFn
    from trinity.algorithm.kl_fn import KL_FN
    from trinity.trainer.tinker.tinker_trainer import TinkerTrainerWrapper
    from trinity.trainer.tinker.utils import to_tinker_input

    from astuner.backbone.local.policy import Optimizer
    from astuner.backbone.trinity.metrics import update_metrics
    from astuner.backbone.trinity.trainer_plugins import EpisodeLoss

    run, policy = config.astuner, local_reference(model).policy
    common = run.trainer_common
    optimizer = Optimizer(policy.trainable(), common.optim, TOTAL_STEPS)
    algorithm = common.algorithm.model_dump(mode="json")
    correction = resolve_correction(run, low_precision=False, can_differ=False)
    loss = EpisodeLoss(
        "tinker",
        algorithm,
        common.kl_loss_coef,
        common.kl_loss_type,
        correction.config.model_dump(mode="json"),
        old_from_trainer=correction.old_from_trainer,
        ages=2,
    )
    reference, logged = local_reference(model), []
    for batch in batches:
        _, _, inputs = to_tinker_input(batch, None)
        for exp, values in zip(batch, inputs, strict=True):
            size = len(values["action_mask"])
            values["ref_logprob"] = torch.tensor(reference.logprobs(exp.tokens.tolist())[-size:])
        trainer = SimpleNamespace(
            model_inputs_list=inputs,
            policy_loss_fn=loss,
            entropy_loss_fn=DummyEntropyLossFn(0.0),
            kl_loss_fn=KL_FN.get("none")(),
            loss_agg_mode="seq-mean-token-sum",
            do_fix_actor_microbatch_loss_scale=False,
        )
        logprobs = []
        for exp in batch:
            ids = exp.tokens.long()[None]
            logits = policy.model(input_ids=ids).logits[0, :-1].log_softmax(-1)
            logprobs.append(logits.gather(-1, ids[0, 1:, None])[:, 0])
        total, metrics = TinkerTrainerWrapper._loss_func(trainer, [], logprobs)
        total.backward()
        logged.append(metrics)
        optimizer.step(1)
    return policy.model.state_dict(), update_metrics(logged)


@pytest.mark.parametrize("algorithm", sorted(set(ALGORITHMS) - {"gdpo", "sft"}))
def test_weights_after_a_step_equal_those_of_the_local_backbone(model_folder: Path, algorithm: str):
    config = small_run(algorithm)
    episodes = make_episodes(local_reference(model_folder).logprobs)
    before = local_reference(model_folder).policy.model.state_dict()
    _, expected = local_reference(model_folder).step(config, episodes)
    updated, _ = tinker_trainer_step(config, model_folder, mini_batches_of(config, episodes))
    assert any(not torch.equal(before[name], value) for name, value in expected.items())
    for name, value in expected.items():
        assert torch.allclose(updated[name], value, atol=1e-6, rtol=1e-4), name


@pytest.mark.parametrize("mode", ["token_tis", "seq_mis", "k3_rs", "decoupled"])
def test_a_corrected_step_equals_that_of_the_local_backbone(model_folder: Path, mode: str):
    config = with_values(
        small_run("grpo"),
        {"astuner.trainer_common.mini_batch_num": 1, "astuner.trainer_common.correction.mode": mode},
    )
    episodes = make_episodes(local_reference(model_folder).logprobs)
    result, expected = local_reference(model_folder).step(config, episodes)
    updated, metrics = tinker_trainer_step(config, model_folder, mini_batches_of(config, episodes, 1))
    for name, value in expected.items():
        assert torch.allclose(updated[name], value, atol=1e-6, rtol=1e-4), name
    measured = {name: value for name, value in result.metrics.items() if name.startswith("correction/")}
    assert len(measured) == 5
    measured |= {f"{name}/stale_0": value for name, value in measured.items()}
    found = {name: value for name, value in metrics.items() if name.startswith("correction/")}
    assert found == pytest.approx(measured, abs=1e-6)


def test_the_correction_is_measured_by_staleness(model_folder: Path):
    config = with_values(
        small_run("reinforce++"),
        {"astuner.trainer_common.mini_batch_num": 1, "astuner.trainer_common.correction.mode": "token_tis"},
    )
    # Step 3 follows version 2 of the weights. Every second episode is from version 1.
    episodes = [
        replace(episode, calls=tuple(replace(call, policy_version=2 - index % 2) for call in episode.calls))
        for index, episode in enumerate(make_episodes(local_reference(model_folder).logprobs))
    ]
    _, metrics = tinker_trainer_step(config, model_folder, mini_batches_of(config, episodes, 1, step=3))
    for index, age in enumerate(("/stale_0", "/stale_1")):
        _, alone = tinker_trainer_step(config, model_folder, mini_batches_of(config, episodes[index::2], 1, step=3))
        for name in ("gap_mean", "gap_max", "effective_sample_size", "truncated", "masked"):
            assert metrics[f"correction/{name}{age}"] == pytest.approx(alone[f"correction/{name}"], abs=1e-6), name
    assert metrics["correction/gap_max"] == max(metrics[f"correction/gap_max/stale_{age}"] for age in (0, 1))
    assert 0.001 < metrics["correction/gap_mean"] < metrics["correction/gap_max"] < 0.01


def test_experiences_contain_the_recorded_tokens_and_masks(model_folder: Path):
    from astuner.backbone.trinity.advantage_fn import EPISODE, SAMPLE
    from astuner.backbone.trinity.metrics import check_samples_match, content_digest

    episodes = make_episodes(local_reference(model_folder).logprobs)
    samples = {(ep.episode_id, index): sample for ep in episodes for index, sample in enumerate(ep.samples)}
    trained = [exp for batch in mini_batches_of(small_run("reinforce++"), episodes) for exp in batch]
    assert len(samples) > len(episodes)
    assert len(trained) == len(samples)
    digests = {}
    for exp in trained:
        sample = samples[exp.info[EPISODE], exp.info[SAMPLE]]
        start = exp.prompt_length
        assert tuple(exp.tokens.tolist()) == sample.token_ids
        assert [int(flag) for flag in exp.action_mask.tolist()] == [
            min(count, 1) for count in sample.train_counts[start:]
        ]
        assert not any(sample.train_counts[:start])
        assert exp.logprobs.tolist() == pytest.approx(sample.logprobs[start:], abs=1e-6)
        name = (exp.info[EPISODE], exp.info[SAMPLE])
        digests[name] = content_digest(exp.tokens.tolist(), exp.action_mask.tolist(), exp.logprobs.tolist())
    check_samples_match(episodes, samples.keys(), digests, 1)


def test_episode_weight_does_not_depend_on_its_timelines(model_folder: Path):
    from astuner.backbone.trinity.advantage_fn import EPISODE

    episodes = make_episodes(local_reference(model_folder).logprobs)
    by_episode = {"trainer_common__algorithm__loss_agg_mode": "seq-mean-token-mean"}
    assert len({len(episode.samples) for episode in episodes}) > 1
    for batch in mini_batches_of(small_run("reinforce++", **by_episode), episodes):
        weights: dict[str, float] = {}
        for exp in batch:
            share = exp.info["scale"][0] * sum(exp.info["counts"]) / len(batch)
            weights[exp.info[EPISODE]] = weights.get(exp.info[EPISODE], 0.0) + share
        assert list(weights.values()) == pytest.approx([1 / len(weights)] * len(weights))
