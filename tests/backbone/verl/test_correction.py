"""The corrections equal those of verl's presets on the same tensors."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from astuner.algorithms.correction import CORRECTION_SUMS, Correction, corrected_loss, correction_summary
from astuner.algorithms.policy_batch import CallTable, PolicyBatch
from astuner.algorithms.registry import resolve
from astuner.backbone.verl import rules
from astuner.config.algorithm_settings import AlgorithmConfig
from astuner.config.corrections import CorrectionConfig
from tests.backbone.verl.plans import CPU, GPU, run_config

pytestmark = pytest.mark.verl

PRESETS = {
    "none": "disabled",
    "token_tis": "decoupled_token_is",
    "seq_tis": "decoupled_seq_is",
    "seq_mis": "decoupled_seq_is_rs",
    "icepop": "decoupled_token_icepop",
    "geo_rs": "decoupled_geo_rs",
    "geo_rs_token_tis": "decoupled_geo_rs_token_tis",
    "geo_rs_seq_tis": "decoupled_geo_rs_seq_tis",
    "k3_rs": "decoupled_k3_rs",
    "k3_rs_token_tis": "decoupled_k3_rs_token_tis",
    "k3_rs_seq_tis": "decoupled_k3_rs_seq_tis",
}


def tensors(mode: str) -> dict[str, torch.Tensor]:
    """Responses of several lengths whose gaps are below, around and above the thresholds."""
    generator = torch.Generator().manual_seed(len(mode))
    rows, width = 64, 24
    sampler = -3 * torch.rand(rows, width, generator=generator, dtype=torch.float64)
    scale = torch.tensor([1e-4, 2e-3, 0.05, 0.15, 0.5, 1.5, 8.0, 0.0], dtype=torch.float64).repeat(rows // 8)[:, None]
    old = sampler + scale * torch.randn(rows, width, generator=generator, dtype=torch.float64)
    lengths = torch.tensor([random.Random(f"{mode}{row}").randint(1, width) for row in range(rows)])
    mask = (torch.arange(width) < lengths[:, None]).long()
    return {
        "sampler": sampler,
        "old": old,
        "current": old + 0.1 * torch.randn(rows, width, generator=generator, dtype=torch.float64),
        "advantages": torch.randn(rows, 1, generator=generator, dtype=torch.float64).expand(rows, width),
        "mask": mask,
        "lengths": lengths,
    }


def our_batch(values: dict[str, torch.Tensor]) -> PolicyBatch:
    rows = torch.arange(len(values["lengths"]))
    return PolicyBatch(
        logprobs=values["current"].clone().requires_grad_(),
        old_logprobs=values["old"],
        advantages=values["advantages"],
        train_counts=values["mask"],
        calls=CallTable(rows, torch.zeros_like(rows), values["lengths"]),
        sampler_logprobs=values["sampler"],
    )


def actor_config(**values: Any) -> Any:
    """Return verl's configuration of a loss that clips ratios at 0.2, without dual clip."""
    from verl.workers.config import FSDPActorConfig

    clip = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 1e9}
    return FSDPActorConfig(**clip, rollout_n=1, ppo_micro_batch_size_per_gpu=1, strategy="fsdp2", **values)


def verl_result(preset: str, values: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Return verl's weights, rejection mask and metrics."""
    from verl.trainer.config.algorithm import RolloutCorrectionConfig
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    config = getattr(RolloutCorrectionConfig, preset)()
    weights, kept, metrics = compute_rollout_correction_and_rejection_mask(
        values["old"],
        values["sampler"],
        values["mask"],
        rollout_is=config.rollout_is,
        rollout_is_threshold=config.rollout_is_threshold,
        rollout_rs=config.rollout_rs,
        rollout_rs_threshold=config.rollout_rs_threshold,
    )
    ones = values["mask"].double()
    return ones if weights is None else weights.batch["rollout_is_weights"], kept, metrics


@pytest.mark.parametrize(("mode", "preset"), PRESETS.items())
def test_factors_equal_verls_weights_and_mask(mode: str, preset: str) -> None:
    values = tensors(mode)
    weights, kept, metrics = verl_result(preset, values)
    factors, sums = Correction(CorrectionConfig(mode=mode), True).factors(our_batch(values))
    torch.testing.assert_close(factors * values["mask"], weights * kept, atol=1e-6, rtol=0)
    summary = correction_summary({name: float(getattr(sums, name)) for name in CORRECTION_SUMS})
    left_out = float(((weights * kept == 0) & (values["mask"] > 0)).sum() / values["mask"].sum())
    assert summary["correction/masked"] == pytest.approx(left_out)
    assert summary["correction/gap_max"] > 5
    if mode != "none":
        assert not torch.allclose(factors * values["mask"], values["mask"].double())
    if mode in ("token_tis", "seq_tis"):
        high = float((weights * values["mask"] >= 2).sum() / values["mask"].sum())
        assert summary["correction/truncated"] == pytest.approx(high)
    assert metrics


BYPASS_PRESETS = {
    "bypass_ppo_clip": ("none", "grpo"),
    "bypass_ppo_clip_geo_rs": ("geo_rs", "grpo"),
    "bypass_ppo_clip_k3_rs": ("k3_rs", "grpo"),
    "bypass_pg_is": ("seq_tis", "rloo"),
    "bypass_pg_token_icepop": ("icepop", "rloo"),
    "bypass_pg_geo_rs": ("geo_rs", "rloo"),
    "bypass_pg_geo_rs_seq_tis": ("geo_rs_seq_tis", "rloo"),
    "bypass_pg_geo_rs_token_tis": ("geo_rs_token_tis", "rloo"),
}


def test_every_preset_of_verl_is_compared() -> None:
    from verl.trainer.config.algorithm import RolloutCorrectionConfig

    presets = {name for name, value in vars(RolloutCorrectionConfig).items() if isinstance(value, classmethod)}
    assert presets == {*PRESETS.values(), *BYPASS_PRESETS}


@pytest.mark.parametrize(("preset", "mode", "algorithm"), [(name, *ours) for name, ours in BYPASS_PRESETS.items()])
def test_gradients_equal_those_of_verls_bypass_mode(preset: str, mode: str, algorithm: str) -> None:
    """Old logprobs of the sampler: a clipped ratio to it, or REINFORCE with weights π / μ."""
    from verl.trainer.config.algorithm import RolloutCorrectionConfig
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import PolicyLossConfig

    values = tensors(mode)
    values["old"] = values["sampler"]
    # Within the gaps that verl limits to e^±20 before it sums them.
    values["current"] = values["sampler"] + (tensors(mode)["old"] - values["sampler"]).clamp(-0.7, 0.7)
    batch = our_batch(values)
    rule = resolve(AlgorithmConfig(adv_estimator=algorithm)).rule
    assert rule is not None
    loss, _ = corrected_loss(rule, Correction(CorrectionConfig(mode=mode), False), batch)
    (ours,) = torch.autograd.grad((loss.token_losses * values["mask"]).sum(), batch.logprobs)

    correction = getattr(RolloutCorrectionConfig, preset)()
    config = actor_config(policy_loss=PolicyLossConfig(loss_mode="bypass_mode", rollout_correction=correction))
    current = values["current"].clone().requires_grad_()
    total, _ = get_policy_loss_fn("bypass_mode")(
        old_log_prob=values["sampler"],
        log_prob=current,
        advantages=values["advantages"],
        response_mask=values["mask"],
        loss_agg_mode="token-mean",
        config=config,
    )
    (theirs,) = torch.autograd.grad(total, current)
    scale = ours.abs().sum() / theirs.abs().sum()  # verl divides by the tokens that are kept
    torch.testing.assert_close(ours, theirs * scale, atol=1e-6, rtol=1e-6)
    assert float(scale) == pytest.approx(round(float(scale)), abs=1e-6)


@pytest.mark.parametrize(("mode", "preset"), PRESETS.items())
def test_gradients_equal_those_of_verls_clipped_loss(mode: str, preset: str) -> None:
    """The sum over tokens: verl divides by the tokens that are kept, astuner by all tokens."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    values = tensors(mode)
    weights, kept, _ = verl_result(preset, values)
    batch = our_batch(values)
    rule = resolve(AlgorithmConfig(adv_estimator="grpo")).rule
    assert rule is not None
    loss, _ = corrected_loss(rule, Correction(CorrectionConfig(mode=mode), True), batch)
    (ours,) = torch.autograd.grad((loss.token_losses * values["mask"]).sum(), batch.logprobs)

    config = actor_config()
    current = values["current"].clone().requires_grad_()
    total, _ = get_policy_loss_fn("vanilla")(
        old_log_prob=values["old"],
        log_prob=current,
        advantages=values["advantages"],
        response_mask=kept,
        loss_agg_mode="token-mean",
        config=config,
        rollout_is_weights=weights,
    )
    (theirs,) = torch.autograd.grad(total * kept.sum(), current)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("mode", "preset"), PRESETS.items())
def test_verls_configuration_describes_the_preset(mode: str, preset: str) -> None:
    from verl.trainer.config.algorithm import RolloutCorrectionConfig

    run = run_config(trainer_common__correction__mode=mode).astuner
    expected = getattr(RolloutCorrectionConfig, preset)()
    assert rules.correction_weights(run, GPU) == ("sequence" if mode == "seq_mis" else expected.rollout_is)
    assert rules.correction_rejection(run, GPU) == (None if mode == "seq_mis" else expected.rollout_rs)
    if expected.rollout_is is not None:
        bounds = "0.5_2" if mode == "seq_mis" else str(expected.rollout_is_threshold).replace("5.0", "5")
        assert str(rules.correction_weight_bounds(run, GPU)) == bounds
    if expected.rollout_rs is not None and mode != "seq_mis":
        assert rules.correction_rejection_bounds(run, GPU) == expected.rollout_rs_threshold
    assert not rules.correction_bypass(run, GPU)


def test_verl_corrects_by_default_on_a_gpu_only() -> None:
    run = run_config().astuner
    assert (rules.correction_weights(run, GPU), rules.correction_bypass(run, GPU)) == ("token", False)
    assert (rules.correction_weights(run, CPU), rules.correction_bypass(run, CPU)) == (None, True)
