"""The loss in verl's workers under Trinity is the local backbone's, however rows are shared out and padded."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from astuner.config.root import RunConfig
from tests.backbone.trinity.test_update import mini_batches_of
from tests.backbone.verl.clusters import TOTAL_STEPS, made_episodes, small_run
from tests.backbone.verl.local_side import Weights, local

pytestmark = pytest.mark.trinity


@pytest.fixture(autouse=True)
def _without_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have verl pack rows as it does where flash-attn is not made for."""
    from einops import rearrange
    from verl.utils import attention_utils
    from verl.utils import npu_flash_attn_utils as packing

    functions = (packing.index_first_axis, packing.pad_input, rearrange, packing.unpad_input)
    monkeypatch.setattr(attention_utils, "_get_attention_functions", lambda: functions)


def logprobs_of(model: Any, data: Any) -> torch.Tensor:
    """As verl's engine has them: of each row's next tokens, one row after the other."""
    found = []
    for ids in data["input_ids"].unbind():
        logits = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        found.append(logits.gather(-1, ids.roll(-1)[:, None])[:, 0])
    return torch.nested.as_nested_tensor(found, layout=torch.jagged)


def verls_step(config: RunConfig, model: Path, batches: list[list[Any]], workers: int) -> tuple[Weights, list[Any]]:
    """Move a model as Trinity's trainer does with verl's workers: their code, but for FSDP and the processes.

    Returns:
        The weights, and each mini-batch's metrics as the workers' are put together.
    """
    from trinity.common.config import AlgorithmConfig
    from trinity.trainer.verl.losses import build_trinity_loss
    from trinity.trainer.verl.monkey_patch import left_right_2_no_padding
    from trinity.trainer.verl.utils import to_data_proto
    from verl.utils import tensordict_utils as tu
    from verl.utils.metric import Metric
    from verl.utils.py_functional import append_to_dict
    from verl.workers.engine.utils import prepare_micro_batches

    from astuner.backbone.local.optimiser import Optimiser
    from astuner.backbone.trinity.rules import loss_args
    from astuner.backbone.trinity.verl_batches import for_workers
    from tests.backbone.trinity.plans import GPU

    run, policy, reference = config.astuner, local(model).policy, local(model)
    optimiser = Optimiser(policy.trainable(), run.trainer_common.optim, TOTAL_STEPS)
    loss = build_trinity_loss(
        AlgorithmConfig(
            policy_loss_fn="astuner.backbone.trinity.loss.EpisodeLoss",
            policy_loss_fn_args=loss_args(run, GPU),
            kl_loss_fn="none",
            kl_loss_fn_args={},
            entropy_loss_fn="none",
            entropy_loss_fn_args={"entropy_coef": 0.0},
            loss_agg_mode="seq-mean-token-sum",
        )
    )
    told = []
    for batch in batches:
        rows = for_workers(batch, workers)
        proto = to_data_proto(rows, 0, policy.model, logging.getLogger())
        proto.batch["old_log_probs"] = proto.batch["rollout_log_probs"]
        if "ref_log_prob" not in proto.batch:
            proto.batch["ref_log_prob"] = torch.zeros_like(proto.batch["advantages"])
            for place, one in enumerate(rows):
                size = len(one.action_mask)
                proto.batch["ref_log_prob"][place, :size] = torch.tensor(
                    reference.logprobs(one.tokens.tolist())[-size:]
                )
        data = left_right_2_no_padding(proto.to_tensordict())
        by_worker = []
        for part in tu.chunk_tensordict(data, workers):
            tu.assign_non_tensor(part, use_dynamic_bsz=True, max_token_len_per_gpu=64, sp_size=1)
            metrics: dict[str, Any] = {}
            for micro in prepare_micro_batches(part)[0]:
                share, sums = loss({"log_probs": logprobs_of(policy.model, micro)}, micro)
                (share / workers).backward()  # as FSDP averages
                append_to_dict(metrics, sums)
            by_worker.append(metrics)
        told.append(
            {
                name: Metric.aggregate_dp([one[name] for one in by_worker])
                for name, value in by_worker[0].items()
                if isinstance(value, Metric)
            }
        )
        optimiser.step(1)
    return policy.model.state_dict(), told


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "dapo", "rloo", "reinforce++", "gspo", "cispo"])
def test_a_step_moves_the_weights_as_the_local_backbone_does(model_folder: Path, algorithm: str, workers: int):
    config = small_run(algorithm)
    episodes = made_episodes(local(model_folder).logprobs)
    before = local(model_folder).policy.model.state_dict()
    _, wanted = local(model_folder).step(config, episodes)
    found, _ = verls_step(config, model_folder, mini_batches_of(config, episodes), workers)
    assert any(not torch.equal(before[name], value) for name, value in wanted.items())
    for name, value in wanted.items():
        assert torch.allclose(found[name], value, atol=1e-6, rtol=1e-4), name


def test_metrics_are_of_the_whole_mini_batch(model_folder: Path):
    from astuner.backbone.trinity.metrics import update_metrics

    config = small_run("grpo")
    episodes = made_episodes(local(model_folder).logprobs)
    result, _ = local(model_folder).step(config, episodes)
    _, told = verls_step(config, model_folder, mini_batches_of(config, episodes), 4)
    found = update_metrics(
        [{f"actor/{name.removeprefix('actor/')}": value for name, value in one.items()} for one in told]
    )
    for name in ("loss/policy", "loss/kl", "loss/total", "ratio/mean", "clip_fraction", "kl/update"):
        assert found[name] == pytest.approx(result.metrics[name], rel=1e-4, abs=1e-6), name
    assert found["update/optimiser_steps"] == 2


@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "rloo"])
def test_what_fills_up_moves_nothing(model_folder: Path, algorithm: str):
    from astuner.backbone.trinity.credit import idle

    config = small_run(algorithm, trainer_common__optim__weight_decay=0.0, trainer_common__use_kl_loss=False)
    like = mini_batches_of(config, made_episodes(local(model_folder).logprobs))[0][0]
    before = local(model_folder).policy.model.state_dict()
    found, told = verls_step(config, model_folder, [[idle(1, like, reference=False)]], 2)
    assert all(torch.equal(before[name], value) for name, value in found.items())
    assert told[0]["actor/ratio/trained_tokens"] == 0
