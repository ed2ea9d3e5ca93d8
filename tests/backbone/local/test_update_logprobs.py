"""The logprobs and advantages that an update records for each sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from astuner import AstunerJob
from astuner.algorithms.registry import resolve
from astuner.backbone.local.forward import token_logprobs
from astuner.backbone.local.policy import Optimizer, Policy
from astuner.backbone.local.update import PolicyUpdate, UpdateResult
from astuner.config.root import AstunerConfig
from astuner.config.trainer import PackMode
from astuner.context_tracker.merge import build_samples
from astuner.run_record import by_token, read_index, read_recorded_episode
from astuner.run_record.updates import call_advantages, count_trained_tokens
from astuner.schema import Episode, Sample
from tests.backbone.local.test_update_modes import episodes_of, moved_policy


def update(
    folder: Path, *, by_call: bool, pack: PackMode = "none", mini_batches: int = 1
) -> tuple[Policy, list[Episode], UpdateResult]:
    """Update the policy with two groups, at a learning rate so small that logprobs can be recomputed afterwards."""
    common = {"use_kl_loss": False, "mini_batch_num": mini_batches, "max_tokens_per_micro_batch": 150}
    config = AstunerConfig.model_validate(
        {"rollout": {"temperature": 1.0}, "trainer_common": common | {"optim": {"lr": 1e-12}}}
    )
    policy = moved_policy(folder, pack)
    made = [
        replace(episode, samples=tuple(build_samples(episode.calls)))
        for episode in episodes_of(folder, by_call=by_call, by_step=False)
    ]
    optimizer = Optimizer(policy.trainable(), config.trainer_common.optim, 1)
    return policy, made, PolicyUpdate(config, resolve(config.trainer_common.algorithm), policy, optimizer).step(made, 1)


def recomputed(policy: Policy, sample: Sample) -> tuple[list[float], list[float]]:
    ids, counts = torch.tensor([sample.token_ids]), torch.tensor([sample.train_counts])
    with torch.no_grad():
        logprobs, entropies = token_logprobs(policy.model, ids, counts, 1.0)
    return logprobs[counts.ne(0)].tolist(), entropies[counts.ne(0)].tolist()


@pytest.mark.parametrize(("pack", "mini_batches"), [("none", 1), ("tree", 1), ("tree", 2)])
def test_the_logprobs_are_the_trainers_own(model_folder: Path, pack: PackMode, mini_batches: int):
    policy, made, result = update(model_folder, by_call=False, pack=pack, mini_batches=mini_batches)
    n_updates = 0
    for episode, updates, advantage in zip(made, result.samples, result.advantages, strict=True):
        for sample, sample_update in zip(episode.samples, updates, strict=True):
            assert sample_update.advantages == ((count_trained_tokens(sample), advantage),)
            # Rewards are 0, 1 and 2: the middle one has no advantage and needs no forward pass.
            assert (sample_update.logprobs is None) == (sample_update.entropies is None) == (advantage == 0)
            if sample_update.logprobs is not None:
                logprobs, entropies = recomputed(policy, sample)
                assert list(sample_update.logprobs) == pytest.approx(logprobs, abs=1e-5)
                assert list(sample_update.entropies or ()) == pytest.approx(entropies, abs=1e-5)
                sampled = [value for value, mask in zip(sample.logprobs, sample.train_counts, strict=True) if mask]
                assert list(sample_update.logprobs) != sampled
                n_updates += 1
    assert n_updates >= 4


def test_each_call_has_the_advantage_that_it_was_trained_with(model_folder: Path):
    _, made, result = update(model_folder, by_call=True)
    n_rewards = set()
    for episode, updates in zip(made, result.samples, strict=True):
        advantage_by_call = call_advantages(episode.samples, updates)
        assert set(advantage_by_call) == {span.call_id for sample in episode.samples for span in sample.spans}
        by_reward: dict[float | None, set[float]] = {}
        for call in episode.calls:
            by_reward.setdefault(call.reward, set()).add(advantage_by_call[call.call_id])
        # Within an episode, calls of one reward have one advantage, and a higher reward a higher one.
        assert all(len(values) == 1 for values in by_reward.values())
        ordered = [values.pop() for _, values in sorted(by_reward.items(), key=lambda item: item[0] or 0.0)]
        assert ordered == sorted(ordered)
        n_rewards.add(len(ordered))
        for sample, sample_update in zip(episode.samples, updates, strict=True):
            advantages, _ = by_token(sample, sample_update)
            assert [value is not None for value in advantages] == [mask > 0 for mask in sample.train_counts]
    assert max(n_rewards) > 1


def test_a_run_records_them(make_job: Callable[..., AstunerJob], tmp_path: Path):
    record = tmp_path / "launcher_record/run"
    make_job(trainer_common__total_training_steps=1, experiment_dir=str(record)).tune()
    trained = [entry for entry in read_index(record) if entry.split == "train" and entry.status == "ok"]
    with_logprobs = 0
    for entry in trained:
        recorded = read_recorded_episode(record / entry.path)
        assert len(recorded.updates) == len(recorded.episode.samples) > 0
        for sample, sample_update in zip(recorded.episode.samples, recorded.updates, strict=True):
            assert {advantage for _, advantage in sample_update.advantages} == {entry.advantage}
            if sample_update.logprobs is not None:
                sampled = [value for value, mask in zip(sample.logprobs, sample.train_counts, strict=True) if mask]
                # The weights have not moved yet.
                assert list(sample_update.logprobs) == pytest.approx(sampled, abs=1e-4)
                with_logprobs += 1
    assert with_logprobs > 0
    measured = next(entry for entry in read_index(record) if entry.split == "val")
    assert read_recorded_episode(record / measured.path).updates == ()
