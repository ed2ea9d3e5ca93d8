"""Updates on one and two verl workers equal those of the local backbone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from astuner.algorithms.credit_assignment import UpdateResult
from astuner.algorithms.distillation.teachers import TeacherSequence
from astuner.config.algorithms import ALGORITHMS
from astuner.config.root import RunConfig
from astuner.errors import BackboneError, RecordError
from astuner.schema import Episode
from tests.backbone.verl.clusters import VerlCluster, make_episodes, small_run, started_cluster, started_ray
from tests.backbone.verl.local_reference import COMPUTED, LocalReference, local_reference, saved_weights

pytestmark = [pytest.mark.verl, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster_ray() -> Iterator[None]:
    with started_ray(2):
        yield


@pytest.fixture(scope="module", params=[2], ids=["two workers"])
def cluster(request: Any, cluster_ray: None, model_folder: Path, tmp_path_factory: Any) -> Iterator[VerlCluster]:
    """Workers on one Ray, since a process can use only one at a time: their number, or two with adapters."""
    workers = 2 if request.param == "adapters" else request.param
    config = small_run(model__lora__rank=4, trainer_common__optim__lr=0.1) if workers != request.param else small_run()
    with started_cluster(config, model_folder, workers, tmp_path_factory.mktemp("verl")) as cluster:
        yield cluster


also_one_worker = pytest.mark.parametrize(
    "cluster", [2, 1], ids=["two workers", "one worker"], indirect=True, scope="module"
)


@also_one_worker
def test_stored_rows_equal_the_samples(cluster: VerlCluster, model_folder: Path):
    episodes = make_episodes(local_reference(model_folder).logprobs)
    stored = cluster.update()._store(episodes, 1)
    samples = [sample for episode in episodes for sample in episode.samples]
    assert len({len(sample.token_ids) for sample in samples}) > 1
    assert len(stored.keys) % cluster.trainer.workers == 0
    names = ["prompts", "responses", "input_ids", "position_ids", "loss_mask", "rollout_log_probs"]
    batch = cluster.trainer.get(stored.keys[: len(samples)], names)
    for index, sample in enumerate(samples):
        row = {name: batch[name][index] for name in names}
        start = len(row["prompts"])
        assert start == min(span.start for span in sample.spans)
        assert tuple(torch.cat([row["prompts"], row["responses"]]).tolist()) == sample.token_ids
        assert tuple(row["input_ids"].tolist()) == sample.token_ids
        assert tuple(row["position_ids"].tolist()) == sample.position_ids
        assert tuple([0] * start + row["loss_mask"].tolist()) == sample.train_counts
        assert row["rollout_log_probs"].tolist() == torch.tensor(sample.logprobs[start:]).tolist()
    cluster.trainer.clear(stored.keys)


def test_weights_that_differ_are_named(cluster: VerlCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import ray

    from astuner.backbone.training.sync_certificate import SyncCertificate
    from astuner.backbone.verl import trainer
    from astuner.backbone.verl.trainer import certify_sync

    certificate = SyncCertificate(torch.float32)

    def check(step: int) -> None:
        certify_sync(cluster.trainer, certificate, step, [5, 6, 7], 1.0)

    cluster.trainer.sync_weights(0)
    check(0)
    servers = cluster.trainer.servers
    last = f"engine {len(servers)} of {len(servers)}"
    # Only the last engine has one weight with another bit.
    sent = saved_weights(cluster.trainer, tmp_path / "model")
    name = "model.layers.1.mlp.up_proj.weight"
    sent[name].view(torch.int32)[3, 5] ^= 1
    ray.get(servers[-1].load_weights.remote(sent, 0))
    with pytest.raises(BackboneError, match=rf"the weight sync after step 1: {last} .* 1 of 25 differ \({name}\)"):
        check(1)
    # Without checksums, as from vLLM, a difference of the logprobs is found.
    ray.get(servers[-1].load_weights.remote({each: value * 1.3 for each, value in sent.items()}, 0))
    monkeypatch.setattr(trainer, "EMBEDDED", "another engine")
    with pytest.raises(BackboneError, match=f"the weight sync after step 2: {last} does not sample with the trainer"):
        check(2)
    cluster.trainer.sync_weights(0)
    check(3)


def test_a_checkpoint_of_another_number_of_workers_is_rejected(cluster: VerlCluster, tmp_path: Path):
    from astuner.backbone.verl.session import VerlCheckpoints

    checkpoints = VerlCheckpoints(tmp_path, keep=1)
    folder = checkpoints.save(3, cluster.trainer, lambda model: model.mkdir(), {"more": 1})
    assert checkpoints.load(cluster.trainer) == {"more": 1, "step": 3}
    state = folder / "progress.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"workers": 3}))
    with pytest.raises(
        RecordError, match=rf"written by 3 training workers.* has {cluster.trainer.workers}\..* is intact"
    ):
        checkpoints.load(cluster.trainer)


@also_one_worker
def test_a_step_updates_the_weights_as_the_local_backbone_does(
    cluster: VerlCluster, model_folder: Path, tmp_path: Path
):
    reference = local_reference(model_folder)
    episodes = make_episodes(reference.logprobs)
    expected, weights = reference.step(cluster.config, episodes)
    result = cluster.update().step(episodes, 1)
    metrics = dict(result.metrics)
    assert metrics.pop(COMPUTED) >= 1
    assert metrics.keys() == expected.metrics.keys()
    assert metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-5)
    assert result.metrics["update/optimiser_steps"] == 2
    assert_same_record(result, expected)
    updated = saved_weights(cluster.trainer, tmp_path / "model")
    before = local_reference(model_folder).policy.model.state_dict()
    assert max(float((updated[name] - before[name]).abs().max()) for name in updated) > 1e-4
    for name, value in weights.items():
        assert float((updated[name] - value).abs().max()) < 1e-5, name


def assert_same_record(result: UpdateResult, expected: UpdateResult) -> None:
    """Check the records of each sample's trained tokens."""
    records = [update for episode in result.samples for update in episode]
    expected_records = [update for episode in expected.samples for update in episode]
    assert sum(update.logprobs is not None for update in records) > 1
    for record, expected_record in zip(records, expected_records, strict=True):
        assert record.advantages == expected_record.advantages
        assert (record.logprobs is None) == (expected_record.logprobs is None)
        assert record.logprobs == pytest.approx(expected_record.logprobs, abs=1e-4)


@also_one_worker
@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_any_number_of_episodes_makes_all_optimizer_steps(cluster: VerlCluster, model_folder: Path, count: int):
    # The workers' weights have changed in earlier tests; sample with the current ones.
    folder = model_folder.parent / f"updated-{cluster.trainer.workers}-{count}"
    cluster.trainer.save_model(folder, "float32")
    episodes = make_episodes(local_reference(folder).logprobs, seed=count)[:count]
    metrics = cluster.update().step(episodes, 2).metrics
    assert metrics.get("update/optimiser_steps", 0) == (0 if count == 1 else 2)


def test_sleeping_engines_that_keep_old_weights_are_named(cluster: VerlCluster, tmp_path: Path):
    from astuner.backbone.training.sync_certificate import SyncCertificate
    from astuner.backbone.verl.trainer import certify_sync

    trainer, certificate = cluster.trainer, SyncCertificate(torch.float32)
    trainer.sync_weights(0)
    certify_sync(trainer, certificate, 0, [5, 6, 7], 1.0)
    trainer.free_engines()
    trainer.save_model(tmp_path / "model", "float32")
    cluster.update().step(make_episodes(local_reference(tmp_path / "model").logprobs, seed=3), 2)
    text = rf"the weight sync after step 1: engine 1 of {len(trainer.servers)} .*; .* the new ones have not arrived"
    with pytest.raises(BackboneError, match=text):
        certify_sync(trainer, certificate, 1, [5, 6, 7], 1.0)
    trainer.sync_weights(1)
    certify_sync(trainer, certificate, 1, [5, 6, 7], 1.0)


def test_a_saved_model_keeps_the_generation_config(cluster: VerlCluster, tmp_path: Path):
    from transformers import GenerationConfig

    start = Path(cluster.trainer.config.actor_rollout_ref.model.path)
    before = GenerationConfig.from_pretrained(start) if (start / "generation_config.json").exists() else None
    GenerationConfig(do_sample=True, temperature=0.7, eos_token_id=[1, 2]).save_pretrained(start)
    try:
        saved_weights(cluster.trainer, tmp_path / "model")
    finally:
        (start / "generation_config.json").unlink()
        if before is not None:
            before.save_pretrained(start)
    after = GenerationConfig.from_pretrained(tmp_path / "model")
    assert (after.temperature, after.eos_token_id) == (0.7, [1, 2])


@pytest.mark.parametrize("algorithm", sorted(set(ALGORITHMS) - {"grpo", "sft"}))
def test_every_algorithm_has_the_loss_and_gradient_of_the_local_backbone(
    cluster: VerlCluster, model_folder: Path, tmp_path: Path, algorithm: str
):
    settings = {"trainer_common__mini_batch_num": 1, "trainer_common__algorithm__use_kl_in_reward": algorithm == "rloo"}
    config = small_run(algorithm, **settings)
    reference = current_reference(cluster, model_folder, tmp_path)
    episodes = make_episodes(reference.logprobs, seed=7)
    assert_metrics_of_the_local_backbone(cluster, config, reference, episodes)


def test_common_prefixes_are_computed_once(
    cluster: VerlCluster, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # Weights that hardly change give all layouts the same step.
    config = small_run(trainer_common__mini_batch_num=1, trainer_common__optim__lr=1e-7)
    reference = current_reference(cluster, model_folder, tmp_path)
    episodes = make_episodes(reference.logprobs, seed=7)
    # Two episodes with the same answers and other rewards.
    episodes[1] = replace(episodes[1], calls=episodes[0].calls, samples=episodes[0].samples)
    computed = {}
    for pack in ("leaf", "tree"):
        monkeypatch.setattr(cluster.trainer, "_pack", pack)
        metrics = assert_metrics_of_the_local_backbone(cluster, config, reference, episodes)
        computed[pack] = metrics[COMPUTED]
    assert computed["tree"] < computed["leaf"]


def test_the_tokens_of_high_entropy_are_those_of_the_local_backbone(
    cluster: VerlCluster, model_folder: Path, tmp_path: Path
):
    """The weights hardly change between the two mini-batches: the workers' optimizer has the state of other tests."""
    share = {"trainer_common__optim__lr": 1e-12, "trainer_common__algorithm__high_entropy_share": 0.3}
    config = small_run(**share, trainer_common__algorithm__entropy_coef=0.01)
    reference = current_reference(cluster, model_folder, tmp_path)
    episodes = make_episodes(reference.logprobs, seed=7)
    metrics = assert_metrics_of_the_local_backbone(cluster, config, reference, episodes)
    assert metrics["update/optimiser_steps"] == 2
    every_token = small_run(trainer_common__optim__lr=1e-7, trainer_common__algorithm__entropy_coef=0.01)
    other = assert_metrics_of_the_local_backbone(cluster, every_token, reference, episodes)
    assert abs(metrics["loss/policy"] - other["loss/policy"]) > 1e-3


def test_the_workers_are_their_own_teacher(cluster: VerlCluster, tmp_path: Path):
    from astuner.backbone.verl.session import PolicyTeacher

    cluster.trainer.save_model(tmp_path / "model", "float32")
    reference = local_reference(tmp_path / "model")
    sequences = [TeacherSequence(ids, [(1, len(ids))], (1.0,)) for ids in ((5, 6, 7, 8), (9, 10), (11, 12, 13))]
    for sequence, values in zip(sequences, PolicyTeacher(cluster.trainer).logprobs(sequences), strict=True):
        assert values.tolist() == pytest.approx(reference.logprobs(list(sequence.token_ids)), abs=1e-5)


@pytest.mark.parametrize("mode", ["auto", "seq_mis"])
def test_a_correction_acts_on_the_distribution_after_top_p(
    cluster: VerlCluster, model_folder: Path, tmp_path: Path, mode: str
):
    correction = {"trainer_common__correction__mode": mode, "rollout__top_p": 0.8}
    config = small_run("reinforce++", trainer_common__mini_batch_num=1, **correction)
    reference = current_reference(cluster, model_folder, tmp_path)
    episodes = [
        replace(
            episode,
            calls=tuple(
                # The engine returns none for a call whose top-p is 1.
                replace(call, sampler_logprobs=tuple(value + 0.1 for value in call.logprobs) if turn != 1 else ())
                for turn, call in enumerate(episode.calls)
            ),
        )
        for episode in make_episodes(reference.logprobs, seed=7)
    ]
    metrics = assert_metrics_of_the_local_backbone(cluster, config, reference, episodes)
    assert 0.05 < metrics["correction/gap_mean"] < 0.1
    assert metrics["logprob_difference"] < 0.01


@pytest.mark.parametrize("cluster", ["adapters"], indirect=True, scope="module")
def test_adapters_are_synced_to_the_engines_merged(cluster: VerlCluster, model_folder: Path, tmp_path: Path):
    from astuner.backbone.training.sync_certificate import SyncCertificate
    from astuner.backbone.verl.trainer import certify_sync

    certificate = SyncCertificate(torch.float32)
    cluster.trainer.sync_weights(0)
    certify_sync(cluster.trainer, certificate, 0, [5, 6, 7], 1.0)
    cluster.update().step(make_episodes(local_reference(model_folder).logprobs), 1)
    # The engines sleep, and keep the weights from before the adapters were trained.
    with pytest.raises(BackboneError, match=r"engine 1 of 2 .*_proj\.weight.*the new ones have not arrived"):
        certify_sync(cluster.trainer, certificate, 1, [5, 6, 7], 1.0)
    cluster.trainer.sync_weights(1)
    certify_sync(cluster.trainer, certificate, 1, [5, 6, 7], 1.0)
    merged = local_reference(model_folder)
    now = saved_weights(cluster.trainer, tmp_path / "model")
    assert now.keys() == merged.policy.model.state_dict().keys()


def current_reference(cluster: VerlCluster, model_folder: Path, folder: Path) -> LocalReference:
    """Return the local backbone with the workers' weights; the reference model is the starting model in both."""
    reference = local_reference(model_folder)
    now = saved_weights(cluster.trainer, folder / "model")
    reference.policy.load_training_state({name: now[name] for name in reference.policy.training_state()})
    return reference


def assert_metrics_of_the_local_backbone(
    cluster: VerlCluster, config: RunConfig, reference: LocalReference, episodes: list[Episode]
) -> dict[str, float]:
    """Do the same training step on both backbones, compare the metrics, and return them."""
    from astuner.backbone.verl.loss import row_loss

    expected, _ = reference.step(config, episodes)
    cluster.trainer._loss = row_loss(config.astuner, torch.float32, other_engine=False)
    cluster.trainer.actor_rollout_wg.set_loss_fn(cluster.trainer._loss)
    result = replace(cluster, config=config).update().step(episodes, 1).metrics
    assert result["grad_norm"] > 1e-4
    assert {name: value for name, value in result.items() if name != COMPUTED} == pytest.approx(
        expected.metrics, rel=2e-4, abs=1e-5
    )
    return result
