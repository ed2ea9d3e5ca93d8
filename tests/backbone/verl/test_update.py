"""Updates on verl's workers are those of the local backbone, on one worker and on two."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from astuner.backbone.step_credit import UpdateResult
from astuner.errors import BackboneError, RecordError
from tests.backbone.verl.clusters import Started, made_episodes, small_run, started
from tests.backbone.verl.local_side import local, saved

pytestmark = [pytest.mark.verl, pytest.mark.slow]


@pytest.fixture(scope="module", params=[1, 2], ids=["one worker", "two workers"])
def cluster(request: Any, model_folder: Path, tmp_path_factory: Any) -> Iterator[Started]:
    with started(small_run(), model_folder, request.param, tmp_path_factory.mktemp("verl")) as everything:
        yield everything


def test_rows_reach_the_workers_as_build_samples_made_them(cluster: Started, model_folder: Path):
    episodes = made_episodes(local(model_folder).logprobs)
    stored = cluster.update()._store(episodes, 1)
    samples = [sample for episode in episodes for sample in episode.samples]
    assert len({len(sample.token_ids) for sample in samples}) > 1
    assert len(stored.keys) % cluster.trainer.workers == 0
    names = ["prompts", "responses", "input_ids", "position_ids", "loss_mask", "rollout_log_probs"]
    found = cluster.trainer.get(stored.keys[: len(samples)], names)
    for index, sample in enumerate(samples):
        row = {name: found[name][index] for name in names}
        start = len(row["prompts"])
        assert start == min(span.start for span in sample.spans)
        assert tuple(torch.cat([row["prompts"], row["responses"]]).tolist()) == sample.token_ids
        assert tuple(row["input_ids"].tolist()) == sample.token_ids
        assert tuple(row["position_ids"].tolist()) == sample.position_ids
        assert tuple([0] * start + row["loss_mask"].tolist()) == sample.loss_mask
        assert row["rollout_log_probs"].tolist() == torch.tensor(sample.logprobs[start:]).tolist()
    cluster.trainer.clear(stored.keys)


def test_weights_that_did_not_arrive_are_noticed(cluster: Started, model_folder: Path, tmp_path: Path):
    import ray

    from astuner.backbone.verl.sync_check import check_first_sync

    def check() -> None:
        check_first_sync(cluster.trainer, cluster.engine, [5, 6, 7], torch.float32, 1.0)

    cluster.trainer.sync_weights(0)
    check()
    stale = {name: value * 1.3 for name, value in saved(cluster.trainer, tmp_path / "model").items()}
    ray.get(cluster.trainer.servers[-1].load_weights.remote(stale, 0))  # one of two, where there are two
    with pytest.raises(BackboneError, match="first weight sync: logprobs of the rollout and of the trainer differ"):
        check()
    cluster.trainer.sync_weights(0)
    check()


def test_a_checkpoint_of_another_number_of_workers_is_named_as_that(cluster: Started, tmp_path: Path):
    from astuner.backbone.verl.checkpoint import VerlCheckpoints

    checkpoints = VerlCheckpoints(tmp_path, keep=1)
    folder = checkpoints.save(3, cluster.trainer, lambda model: model.mkdir(), {"more": 1})
    assert checkpoints.load(cluster.trainer) == {"more": 1, "step": 3}
    state = folder / "progress.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"workers": 3}))
    with pytest.raises(RecordError, match=rf"made with 3 training workers.* has {cluster.trainer.workers}\..*keep it"):
        checkpoints.load(cluster.trainer)


def test_a_step_moves_the_weights_as_the_local_backbone_does(cluster: Started, model_folder: Path, tmp_path: Path):
    here = local(model_folder)
    episodes = made_episodes(here.logprobs)
    expected, weights = here.step(cluster.config, episodes)
    got = cluster.update().step(episodes, 1)
    assert got.metrics.keys() == expected.metrics.keys()
    assert got.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-5)
    assert got.metrics["update/optimiser_steps"] == 2
    assert_same_record(got, expected)
    moved = saved(cluster.trainer, tmp_path / "model")
    before = local(model_folder).policy.model.state_dict()
    assert max(float((moved[name] - before[name]).abs().max()) for name in moved) > 1e-4
    for name, value in weights.items():
        assert float((moved[name] - value).abs().max()) < 1e-5, name


def assert_same_record(got: UpdateResult, expected: UpdateResult) -> None:
    """Check what is kept of each sample's trained tokens."""
    ours = [update for episode in got.samples for update in episode]
    theirs = [update for episode in expected.samples for update in episode]
    assert sum(update.logprobs is not None for update in ours) > 1
    for one, other in zip(ours, theirs, strict=True):
        assert one.advantages == other.advantages
        assert (one.logprobs is None) == (other.logprobs is None)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_any_number_of_episodes_makes_the_wanted_optimiser_steps(cluster: Started, model_folder: Path, count: int):
    # What the workers have learnt until now is not what these were sampled with.
    folder = model_folder.parent / f"moved-{cluster.trainer.workers}-{count}"
    cluster.trainer.save_model(folder, "float32")
    episodes = made_episodes(local(folder).logprobs, seed=count)[:count]
    metrics = cluster.update().step(episodes, 2).metrics
    assert metrics.get("update/optimiser_steps", 0) == (0 if count == 1 else 2)


def test_a_saved_model_generates_as_the_one_it_came_from(cluster: Started, tmp_path: Path):
    from transformers import GenerationConfig

    start = Path(cluster.trainer.config.actor_rollout_ref.model.path)
    before = GenerationConfig.from_pretrained(start) if (start / "generation_config.json").exists() else None
    GenerationConfig(do_sample=True, temperature=0.7, eos_token_id=[1, 2]).save_pretrained(start)
    try:
        saved(cluster.trainer, tmp_path / "model")
    finally:
        (start / "generation_config.json").unlink()
        if before is not None:
            before.save_pretrained(start)
    after = GenerationConfig.from_pretrained(tmp_path / "model")
    assert (after.temperature, after.eos_token_id) == (0.7, [1, 2])


@pytest.mark.parametrize("algorithm", ["dr_grpo", "dapo", "rloo", "reinforce++", "gspo", "cispo"])
def test_every_algorithm_has_the_local_loss_and_gradient(
    cluster: Started, model_folder: Path, tmp_path: Path, algorithm: str
):
    from astuner.backbone.verl.loss import row_loss

    settings = {"trainer_common__mini_batch_num": 1, "trainer_common__algorithm__use_kl_in_reward": algorithm == "rloo"}
    config = small_run(algorithm, **settings)
    here = local(model_folder)
    # The workers have learnt meanwhile; the reference is the starting model on both sides.
    now = saved(cluster.trainer, tmp_path / "model")
    here.policy.load_training_state({name: now[name] for name in here.policy.training_state()})
    episodes = made_episodes(here.logprobs, seed=7)
    expected, _ = here.step(config, episodes)
    cluster.trainer.actor_rollout_wg.set_loss_fn(row_loss(config.astuner, torch.float32))
    got = replace(cluster, config=config).update().step(episodes, 1).metrics
    assert got["grad_norm"] > 1e-4
    assert got == pytest.approx(expected.metrics, rel=2e-4, abs=1e-5)
