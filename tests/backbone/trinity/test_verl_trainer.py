"""The loss of verl's workers under Trinity equals the local backbone's, however rows are distributed and padded."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from astuner.algorithms.distillation.distiller import Distiller
from astuner.algorithms.distillation.teachers import ModelTeacher
from astuner.config.algorithms import ALGORITHMS
from astuner.config.root import RunConfig
from tests.backbone.trinity.test_update import mini_batches_of
from tests.backbone.verl.clusters import TOTAL_STEPS, make_episodes, small_run
from tests.backbone.verl.local_reference import Weights, local_reference

pytestmark = pytest.mark.trinity


@pytest.fixture(autouse=True)
def _without_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove padding as on machines without flash-attn."""
    from verl.utils import attention_utils

    from astuner.backbone.trinity.verl_trainer import pack_without_flash_attention

    # Restored after the test.
    monkeypatch.setattr(attention_utils, "_get_attention_functions", attention_utils._get_attention_functions)
    pack_without_flash_attention()


def outputs_of(model: Any, data: Any) -> dict[str, torch.Tensor]:
    """Return the log-probabilities of each row's next tokens, and the entropies, as verl's engine does."""
    logprobs = []
    entropies = []
    for ids in data["input_ids"].unbind():
        logits = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        logprobs.append(logits.gather(-1, ids.roll(-1)[:, None])[:, 0])
        entropies.append(-(logits.exp() * logits).sum(-1))
    names = {"log_probs": logprobs, "entropy": entropies}
    return {name: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for name, rows in names.items()}


def verl_step(config: RunConfig, model: Path, batches: list[list[Any]], workers: int) -> tuple[Weights, list[Any]]:
    """Update a model as Trinity's trainer does with verl's workers, without FSDP and separate processes.

    Returns:
        The weights, and the workers' aggregated metrics of each mini-batch.
    """
    from trinity.common.config import AlgorithmConfig
    from trinity.trainer.verl.losses import build_trinity_loss
    from trinity.trainer.verl.monkey_patch import left_right_2_no_padding
    from trinity.trainer.verl.utils import to_data_proto
    from verl.utils import tensordict_utils as tu
    from verl.utils.metric import Metric
    from verl.utils.py_functional import append_to_dict
    from verl.workers.engine.utils import prepare_micro_batches

    from astuner.backbone.local.policy import Optimizer
    from astuner.backbone.trinity.rules import entropy_args, entropy_loss, loss_args
    from astuner.backbone.trinity.verl_trainer import worker_rows
    from tests.backbone.trinity.plans import GPU

    run, policy, reference = config.astuner, local_reference(model).policy, local_reference(model)
    optimizer = Optimizer(policy.trainable(), run.trainer_common.optim, TOTAL_STEPS)
    loss = build_trinity_loss(
        AlgorithmConfig(
            policy_loss_fn="astuner.backbone.trinity.trainer_plugins.EpisodeLoss",
            policy_loss_fn_args=loss_args(run.model_copy(update={"backbone": "trinity"}), GPU),
            kl_loss_fn="none",
            kl_loss_fn_args={},
            entropy_loss_fn=entropy_loss(run, GPU),
            entropy_loss_fn_args=entropy_args(run, GPU),
            loss_agg_mode="seq-mean-token-sum",
        )
    )
    metrics_by_batch = []
    for batch in batches:
        rows = worker_rows(batch, workers)
        proto = to_data_proto(rows, 0, policy.model, logging.getLogger())
        proto.batch["old_log_probs"] = proto.batch["rollout_log_probs"]
        if "ref_log_prob" not in proto.batch:
            proto.batch["ref_log_prob"] = torch.zeros_like(proto.batch["advantages"])
            for index, row in enumerate(rows):
                size = len(row.action_mask)
                proto.batch["ref_log_prob"][index, :size] = torch.tensor(
                    reference.logprobs(row.tokens.tolist())[-size:]
                )
        data = left_right_2_no_padding(proto.to_tensordict())
        by_worker = []
        for part in tu.chunk_tensordict(data, workers):
            tu.assign_non_tensor(part, use_dynamic_bsz=True, max_token_len_per_gpu=64, sp_size=1)
            metrics: dict[str, Any] = {}
            for micro in prepare_micro_batches(part)[0]:
                share, sums = loss(outputs_of(policy.model, micro), micro)
                (share / workers).backward()  # FSDP averages gradients
                append_to_dict(metrics, sums)
            by_worker.append(metrics)
        metrics_by_batch.append(
            {
                name: Metric.aggregate_dp([metrics[name] for metrics in by_worker])
                for name, value in by_worker[0].items()
                if isinstance(value, Metric)
            }
        )
        optimizer.step(1)
    return policy.model.state_dict(), metrics_by_batch


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("algorithm", sorted(set(ALGORITHMS) - {"sft"}))
def test_weights_after_a_step_equal_those_of_the_local_backbone(model_folder: Path, algorithm: str, workers: int):
    # By default, Trinity's explorer is another engine, which rloo is corrected for.
    config = small_run(algorithm, trainer_common__correction__mode="none")
    episodes = make_episodes(local_reference(model_folder).logprobs)
    before = local_reference(model_folder).policy.model.state_dict()
    _, expected = local_reference(model_folder).step(config, episodes)
    updated, _ = verl_step(config, model_folder, mini_batches_of(config, episodes), workers)
    assert any(not torch.equal(before[name], value) for name, value in expected.items())
    for name, value in expected.items():
        assert torch.allclose(updated[name], value, atol=1e-6, rtol=1e-4), name


def test_the_entropy_bonus_is_that_of_the_local_backbone(model_folder: Path):
    from astuner.backbone.trinity.metrics import update_metrics

    # Without a KL term, an episode without an advantage has the gradient of the bonus only.
    config = small_run(trainer_common__algorithm__entropy_coef=0.1, trainer_common__use_kl_loss=False)
    episodes = make_episodes(local_reference(model_folder).logprobs)
    result, expected = local_reference(model_folder).step(config, episodes)
    updated, metrics_by_batch = verl_step(config, model_folder, mini_batches_of(config, episodes), 2)
    for name, value in expected.items():
        assert torch.allclose(updated[name], value, atol=1e-6, rtol=1e-4), name
    combined = update_metrics(with_prefix(metrics_by_batch))
    for name in ("loss/policy", "loss/total", "entropy"):
        assert combined[name] == pytest.approx(result.metrics[name], rel=1e-4, abs=1e-6), name
    assert combined["loss/policy"] - combined["loss/total"] == pytest.approx(0.1 * combined["entropy"], rel=0.3)
    _, without = local_reference(model_folder).step(small_run(trainer_common__use_kl_loss=False), episodes)
    assert not all(torch.allclose(updated[name], value, atol=1e-6, rtol=1e-4) for name, value in without.items())


def test_a_teacher_has_the_effect_that_it_has_on_the_local_backbone(model_folder: Path):
    settings = {"teacher": "folder", "coef": 2.0, "reward_coef": 0.5}
    config = small_run(**{f"trainer_common__distillation__{name}": value for name, value in settings.items()})
    episodes = make_episodes(local_reference(model_folder).logprobs)
    teacher = local_reference(model_folder).policy.model
    with torch.no_grad():
        teacher.model.norm.weight.mul_(2)  # a sharper distribution
    # Only hints need a codec.
    distiller = Distiller(config.astuner.trainer_common.distillation, ModelTeacher(teacher, 256), None)  # type: ignore[arg-type]
    _, expected = local_reference(model_folder).step(config, episodes, distiller)
    updated, _ = verl_step(config, model_folder, mini_batches_of(config, episodes, distiller=distiller), 2)
    for name, value in expected.items():
        assert torch.allclose(updated[name], value, atol=1e-6, rtol=1e-4), name
    _, without = local_reference(model_folder).step(small_run(), episodes)
    assert not all(torch.allclose(updated[name], value, atol=1e-6, rtol=1e-4) for name, value in without.items())


def with_prefix(metrics_by_batch: list[Any]) -> list[dict[str, float]]:
    """Return metrics with the names that Trinity's trainer gives them."""
    return [
        {f"actor/{name.removeprefix('actor/')}": value for name, value in metrics.items()}
        for metrics in metrics_by_batch
    ]


def test_metrics_cover_the_whole_mini_batch(model_folder: Path):
    from astuner.backbone.trinity.metrics import update_metrics

    config = small_run("grpo")
    episodes = make_episodes(local_reference(model_folder).logprobs)
    result, _ = local_reference(model_folder).step(config, episodes)
    _, metrics_by_batch = verl_step(config, model_folder, mini_batches_of(config, episodes), 4)
    combined = update_metrics(with_prefix(metrics_by_batch))
    for name in ("loss/policy", "loss/kl", "loss/total", "ratio/mean", "clip_fraction", "kl/update"):
        assert combined[name] == pytest.approx(result.metrics[name], rel=1e-4, abs=1e-6), name
    assert combined["update/optimiser_steps"] == 2


@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "rloo"])
def test_padding_changes_no_weights(model_folder: Path, algorithm: str):
    from astuner.backbone.trinity.advantage_fn import padding_experience

    config = small_run(algorithm, trainer_common__optim__weight_decay=0.0, trainer_common__use_kl_loss=False)
    template = mini_batches_of(config, make_episodes(local_reference(model_folder).logprobs))[0][0]
    before = local_reference(model_folder).policy.model.state_dict()
    updated, metrics_by_batch = verl_step(
        config, model_folder, [[padding_experience(1, template, use_reference=False)]], 2
    )
    assert all(torch.equal(before[name], value) for name, value in updated.items())
    assert metrics_by_batch[0]["actor/ratio/trained_tokens"] == 0


async def test_a_saved_step_is_not_written_again():
    from astuner.backbone.trinity.verl_trainer import WholeBatchTrainer

    written: list[int] = []

    async def done(**_: Any) -> None:
        return

    async def write(**_: Any) -> None:
        written.append(engine.train_step_num)

    engine = SimpleNamespace(train_step_num=0, prepare=done, save_checkpoint=write, wait_for_save=done)
    trainer = object.__new__(WholeBatchTrainer)
    trainer.engine, trainer.logger = engine, logging.getLogger()
    trainer.state = SimpleNamespace(save_trainer=lambda **_: None)
    trainer.sample_strategy = SimpleNamespace(state_dict=dict)
    trainer.synchronizer = SimpleNamespace(set_trainer_status=SimpleNamespace(remote=lambda _: done()))
    await trainer.prepare()
    for engine.train_step_num in (0, 2, 2, 3):
        await trainer.save_checkpoint(block_until_saved=True)
    assert written == [0, 2, 3]
    engine.train_step_num = 7
    await trainer.prepare()  # as if the run had resumed from this step
    await trainer.save_checkpoint(block_until_saved=True)
    assert written == [0, 2, 3]
