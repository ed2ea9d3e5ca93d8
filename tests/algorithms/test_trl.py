"""Losses and gradients equal those of TRL's GRPOTrainer, where it has the same algorithm. The tests need TRL."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from astuner.algorithms.aggregate import sample_scales, token_weights
from astuner.algorithms.correction import Correction, corrected_loss
from astuner.algorithms.kl import high_entropy_threshold, token_kl
from astuner.algorithms.policy_batch import CallTable, PolicyBatch
from astuner.algorithms.registry import resolve
from astuner.config.algorithm_settings import AlgorithmConfig
from astuner.config.corrections import CorrectionConfig

MAX_LENGTH = 12
# Six answers of three groups. TRL's tensors are padded on the right.
LENGTHS = torch.tensor([12, 3, 7, 1, 9, 5])
ADVANTAGES = torch.tensor([1.2, -0.7, 0.0, -1.1, 0.4, -0.4], dtype=torch.float64)


def tensors() -> dict[str, Tensor]:
    """Return the inputs: ratios between 0.3 and 3.3, so that every algorithm clips some tokens on both sides."""
    generator = torch.Generator().manual_seed(5)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand((6, MAX_LENGTH), generator=generator, dtype=torch.float64)

    mask = (torch.arange(MAX_LENGTH) < LENGTHS[:, None]).long()
    logprobs = uniform(-4.0, -0.1)
    # The answers as a whole are near the old policy, as sequence ratios must be for some of them not to be clipped.
    old = logprobs - uniform(-1.2, 1.2) * torch.tensor([1.0, 1.0, 1e-3, 1e-3, 1.0, 1.0])[:, None]
    return {
        "logprobs": logprobs,
        "old": old,
        "reference": logprobs + uniform(-1.0, 1.0),
        "entropies": uniform(0.0, 3.0),
        "mask": mask,
    }


def trl_loss(values: dict[str, Tensor], loss_type: str, **settings: Any) -> Tensor:
    """Return TRL's loss of a generation batch that is one batch of the optimizer, with TRL's own code."""
    trainer_class = pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer
    args = SimpleNamespace(
        delta=None,
        use_bias_correction_kl=False,
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        steps_per_generation=1,
    )
    alone = SimpleNamespace(
        num_processes=1,
        sync_gradients=True,
        gather=lambda values: values,
        reduce=lambda values, reduction: values,
        pad_across_processes=lambda values, dim, pad_index: values,
    )
    attributes: dict[str, Any] = {
        "accelerator": alone,
        "args": args,
        "aux_loss_enabled": False,
        "beta": 0.0,
        "current_gradient_accumulation_steps": 1,
        "entropy_coef": 0.0,
        "epsilon_high": 0.2,
        "epsilon_low": 0.2,
        "importance_sampling_level": "token",
        "loss_type": loss_type,
        "max_completion_length": MAX_LENGTH,
        "model": SimpleNamespace(training=True),
        "off_policy_mask_threshold": None,
        "top_entropy_quantile": 1.0,
        "use_adaptive_entropy": False,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "_metrics": {"train": defaultdict(list)},
    }
    args.delta = settings.pop("delta", None)
    trainer = SimpleNamespace(**attributes | settings)
    trainer._entropy_bonus_enabled = trainer.entropy_coef > 0
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (values["logprobs"], values["entropies"], None)
    trainer.get_off_policy_mask = trainer_class.get_off_policy_mask
    trainer.get_high_entropy_mask = lambda *inputs: trainer_class.get_high_entropy_mask(trainer, *inputs)
    prompts = torch.ones((6, 1), dtype=torch.int64)
    inputs = {
        "prompt_ids": prompts,
        "prompt_mask": prompts,
        "completion_ids": torch.ones((6, MAX_LENGTH), dtype=torch.int64),
        "completion_mask": values["mask"],
        "advantages": ADVANTAGES,
        "old_per_token_logps": values["old"],
        "ref_per_token_logps": values["reference"],
        "num_items_in_batch": values["mask"].sum(),
        "importance_sampling_ratio": torch.ones((6, 1)),
    }
    loss: Tensor = trainer_class._compute_loss(trainer, None, inputs)
    return loss


def own_loss(
    values: dict[str, Tensor], algorithm: dict[str, Any], kl_coef: float, correction: dict[str, Any]
) -> Tensor:
    """Return the loss of a mini-batch as the backbones compute it; each answer is one LLM call."""
    config = AlgorithmConfig.model_validate(algorithm)
    resolved = resolve(config)
    assert resolved.rule is not None
    mask = values["mask"]
    batch = PolicyBatch(
        logprobs=values["logprobs"],
        old_logprobs=values["old"],
        advantages=ADVANTAGES[:, None].expand(mask.shape),
        train_counts=mask,
        calls=CallTable(torch.arange(6), torch.zeros_like(LENGTHS), LENGTHS),
        sampler_logprobs=values["old"],
    )
    result, _ = corrected_loss(resolved.rule, Correction(CorrectionConfig(**correction), False), batch)
    scales = sample_scales(mask.sum(1), torch.arange(6), resolved.loss_agg_mode, MAX_LENGTH)
    weights = token_weights(mask, scales).double()
    losses = result.token_losses
    if config.high_entropy_share < 1:
        threshold = high_entropy_threshold(
            values["entropies"].detach().flatten(), mask.flatten(), config.high_entropy_share
        )
        losses = losses * (values["entropies"] > threshold)
    losses = losses + kl_coef * batch.only_trained(token_kl(values["logprobs"], values["reference"], "low_var_kl"))
    losses = losses - config.entropy_coef * batch.only_trained(values["entropies"])
    return (losses * weights).sum()


GSPO = {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4}


@pytest.mark.parametrize(
    ("own", "loss_type", "theirs"),
    [
        ({"adv_estimator": "grpo"}, "grpo", {}),
        ({"adv_estimator": "grpo", "clip_ratio_dual": 2.5}, "grpo", {"delta": 2.5}),
        ({"adv_estimator": "grpo", "kl_coef": 0.1}, "grpo", {"beta": 0.1}),
        ({"adv_estimator": "grpo", "off_policy_mask": 0.1}, "grpo", {"off_policy_mask_threshold": 0.1}),
        ({"adv_estimator": "grpo", "loss_agg_mode": "token-mean"}, "bnpo", {}),
        (
            {"adv_estimator": "grpo", "loss_agg_mode": "token-mean", "entropy_coef": 0.05},
            "bnpo",
            {"entropy_coef": 0.05},
        ),
        # 0.3 of 37 tokens are 11 in both. TRL rounds the number of tokens up.
        (
            {"adv_estimator": "grpo", "loss_agg_mode": "token-mean", "high_entropy_share": 0.3},
            "bnpo",
            {"top_entropy_quantile": 0.3},
        ),
        ({"adv_estimator": "dr_grpo"}, "dr_grpo", {}),
        ({"adv_estimator": "dapo"}, "dapo", {"epsilon_high": 0.28}),
        ({"adv_estimator": "dapo", "clip_ratio_dual": 2.0}, "dapo", {"epsilon_high": 0.28, "delta": 2.0}),
        # TRL's bound is that of the ratio, not its distance from 1.
        ({"adv_estimator": "cispo", "clip_ratio_high": 1.0}, "cispo", {"epsilon_high": 2.0}),
        ({"adv_estimator": "gspo"}, "grpo", GSPO),
        ({"adv_estimator": "gspo_token"}, "grpo", GSPO),
        ({"adv_estimator": "sapo"}, "sapo", {}),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_loss_and_gradient_equal_those_of_trl(own: dict[str, Any], loss_type: str, theirs: dict[str, Any]) -> None:
    results = []
    algorithm = {name: value for name, value in own.items() if name not in ("kl_coef", "off_policy_mask")}
    correction = {"mode": "none"}
    if "off_policy_mask" in own:
        correction = {"mode": "off_policy_mask", "max_rejection": own["off_policy_mask"]}
    for compute in (
        lambda values: trl_loss(values, loss_type, **theirs),
        lambda values: own_loss(values, algorithm, own.get("kl_coef", 0.0), correction),
    ):
        values = tensors()
        values["logprobs"].requires_grad_()
        values["entropies"].requires_grad_()
        loss = compute(values)
        inputs = [values["logprobs"], values["entropies"]]
        results.append((loss.detach(), *torch.autograd.grad(loss, inputs, materialize_grads=True)))
    trl, own_results = results
    assert trl[1].abs().max() > 1e-3
    torch.testing.assert_close(own_results, trl, rtol=1e-6, atol=1e-6)
