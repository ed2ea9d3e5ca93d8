"""What an update says of each sample: the logprobs and advantages that it was trained with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from astuner import AstunerJob
from astuner.backbone.algorithms import resolve
from astuner.backbone.local.forward import token_logprobs
from astuner.backbone.local.optimiser import Optimiser
from astuner.backbone.local.policy import Policy
from astuner.backbone.local.update import PolicyUpdate, UpdateResult
from astuner.config.rollout import ModelConfig
from astuner.config.root import AstunerConfig
from astuner.config.trainer import PackMode
from astuner.context_tracker import build_samples
from astuner.run_record import by_token, call_advantages, read_index, read_recorded_episode, trained_tokens
from astuner.schema import Episode, Sample
from tests.backbone.local.test_update_modes import episodes_of


def update(
    folder: Path, *, by_call: bool, pack: PackMode = "none", mini_batches: int = 1
) -> tuple[Policy, list[Episode], UpdateResult]:
    """One update of two groups; its weights move by next to nothing, so that they can be asked again."""
    common = {"use_kl_loss": False, "mini_batch_num": mini_batches, "max_tokens_per_micro_batch": 150}
    config = AstunerConfig.model_validate(
        {"rollout": {"temperature": 1.0}, "trainer_common": common | {"optim": {"lr": 1e-12}}}
    )
    policy = Policy(ModelConfig(), str(folder), torch.device("cpu"), pack)
    made = [replace(one, samples=tuple(build_samples(one.calls))) for one in episodes_of(policy, by_call=by_call)]
    optimiser = Optimiser(policy.trainable(), config.trainer_common.optim, 1)
    return policy, made, PolicyUpdate(config, resolve(config.trainer_common.algorithm), policy, optimiser).step(made, 1)


def recomputed(policy: Policy, sample: Sample) -> list[float]:
    ids, wanted = torch.tensor([sample.token_ids]), torch.tensor([sample.loss_mask])
    with torch.no_grad():
        logprobs, _ = token_logprobs(policy.model, ids, wanted, 1.0)
    return [float(value) for value in logprobs[wanted.ne(0)]]


@pytest.mark.parametrize(("pack", "mini_batches"), [("none", 1), ("tree", 1), ("tree", 2)])
def test_the_logprobs_are_the_trainers_own(model_folder: Path, pack: PackMode, mini_batches: int):
    policy, made, result = update(model_folder, by_call=False, pack=pack, mini_batches=mini_batches)
    told = 0
    for episode, updates, advantage in zip(made, result.samples, result.advantages, strict=True):
        for sample, one in zip(episode.samples, updates, strict=True):
            assert one.advantages == ((trained_tokens(sample), advantage),)
            # Rewards are 0, 1 and 2: that of the middle has no advantage, and so no forward pass of its own.
            assert (one.logprobs is None) == (advantage == 0)
            if one.logprobs is not None:
                assert list(one.logprobs) == pytest.approx(recomputed(policy, sample), abs=1e-5)
                sampled = [value for value, mask in zip(sample.logprobs, sample.loss_mask, strict=True) if mask]
                assert list(one.logprobs) != sampled
                told += 1
    assert told >= 4


def test_each_call_has_the_advantage_that_it_was_trained_with(model_folder: Path):
    _, made, result = update(model_folder, by_call=True)
    seen = set()
    for episode, updates in zip(made, result.samples, strict=True):
        found = call_advantages(episode.samples, updates)
        assert set(found) == {span.call_id for sample in episode.samples for span in sample.spans}
        by_reward: dict[float | None, set[float]] = {}
        for call in episode.calls:
            by_reward.setdefault(call.reward, set()).add(found[call.call_id])
        # Within an episode, calls of one reward have one advantage, and a higher reward a higher one.
        assert all(len(values) == 1 for values in by_reward.values())
        ordered = [values.pop() for _, values in sorted(by_reward.items(), key=lambda item: item[0] or 0.0)]
        assert ordered == sorted(ordered)
        seen.add(len(ordered))
        for sample, one in zip(episode.samples, updates, strict=True):
            advantages, _ = by_token(sample, one)
            assert [value is not None for value in advantages] == [mask > 0 for mask in sample.loss_mask]
    assert max(seen) > 1


def test_a_run_records_them(make_job: Callable[..., AstunerJob], tmp_path: Path):
    record = tmp_path / "launcher_record/run"
    make_job(trainer_common__total_training_steps=1, experiment_dir=str(record)).tune()
    trained = [entry for entry in read_index(record) if entry.split == "train" and entry.status == "ok"]
    with_logprobs = 0
    for entry in trained:
        recorded = read_recorded_episode(record / entry.path)
        assert len(recorded.updates) == len(recorded.episode.samples) > 0
        for sample, one in zip(recorded.episode.samples, recorded.updates, strict=True):
            assert {advantage for _, advantage in one.advantages} == {entry.advantage}
            if one.logprobs is not None:
                sampled = [value for value, mask in zip(sample.logprobs, sample.loss_mask, strict=True) if mask]
                assert list(one.logprobs) == pytest.approx(sampled, abs=1e-4)  # the weights have not moved yet
                with_logprobs += 1
    assert with_logprobs > 0
    measured = next(entry for entry in read_index(record) if entry.split == "val")
    assert read_recorded_episode(record / measured.path).updates == ()
