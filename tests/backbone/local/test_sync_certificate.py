"""A run stops in the step in which an engine does not have the trainer's weights, and names them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from astuner import AstunerJob
from astuner.backbone.local.policy import Policy
from astuner.backbone.training.sync_certificate import SyncCertificate
from astuner.config.model import ModelConfig
from astuner.errors import BackboneError
from astuner.llm_engine.causal_lm import load_causal_lm
from astuner.llm_engine.embedded import EmbeddedEngine
from astuner.llm_engine.embedded.fast_forward import FastForward
from astuner.llm_engine.embedded.prefix_tree import PrefixTree
from astuner.llm_engine.weight_digests import weight_digests
from astuner.run_record import read_metrics

MakeJob = Callable[..., AstunerJob]
# So small that the logprobs of wrong weights look right.
TINY_LR = {"trainer_common__optim__lr": 1e-7}


def stops(job: AstunerJob, folder: Path) -> str:
    """Run the job until it stops in the first training step, and return the error."""
    with pytest.raises(BackboneError) as error:
        job.tune(folder / "records")
    assert [row.step for row in read_metrics(folder / "records/run") if "loss/policy" in row.metrics] == []
    return str(error.value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_that_do_not_arrive(make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str):
    def without_adapters(policy: Policy) -> Mapping[str, Tensor]:
        state = policy.model.get_base_model().state_dict()
        return {name.replace(".base_layer", ""): value for name, value in state.items() if "lora_" not in name}

    monkeypatch.setattr(Policy, "full_weights", without_adapters)
    said = stops(make_job(model__lora__rank=4, model__dtype=dtype, trainer_common__optim__lr=1e-3), tmp_path)
    assert "the weight sync after step 1: the embedded engine does not have the trainer's weights" in said
    assert "_proj.weight" in said
    assert "the new ones have not arrived" in said


def test_an_engine_that_keeps_old_weights(make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    load, loads = FastForward.load, []

    def first_only(forward: FastForward, weights: Mapping[str, Tensor]) -> None:
        loads.append(weights)
        if len(loads) == 1:
            load(forward, weights)

    monkeypatch.setattr(FastForward, "load", first_only)
    said = stops(make_job(**TINY_LR), tmp_path)
    assert "the weight sync after step 1: the embedded engine does not have the trainer's weights" in said
    assert "the new ones have not arrived" in said


def test_one_corrupted_weight(make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    load, loads = FastForward.load, []
    name = "model.layers.1.mlp.up_proj.weight"

    def flips_a_bit(forward: FastForward, weights: Mapping[str, Tensor]) -> None:
        loads.append(weights)
        copies = {each: value.clone() for each, value in weights.items()} if len(loads) == 2 else dict(weights)
        if len(loads) == 2:
            copies[name].view(torch.int32)[3, 5] ^= 1
        load(forward, copies)

    monkeypatch.setattr(FastForward, "load", flips_a_bit)
    said = stops(make_job(**TINY_LR), tmp_path)
    assert f"the embedded engine does not have the trainer's weights: 1 of 25 differ ({name})" in said
    assert "changed on the way" in said


def test_a_cache_of_old_weights(make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(PrefixTree, "clear", lambda tree: None if hasattr(tree, "_root") else clear(tree))
    said = stops(make_job(trainer_common__optim__lr=0.5, trainer_common__optim__grad_clip=1e6), tmp_path)
    assert "the embedded engine does not sample with the trainer's weights: the logprobs of 4 tokens differ" in said


clear = PrefixTree.clear


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_digests_of_policy_and_engine_agree(model_folder: Path, dtype: str, rank: int):
    config = ModelConfig.model_validate({"dtype": dtype, "lora": {"rank": rank}})
    policy = Policy(config, str(model_folder), torch.device("cpu"))
    with torch.no_grad():
        for parameter in policy.trainable():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    engine = EmbeddedEngine(policy.frozen_copy(), max_model_len=64)
    try:
        before = engine.weight_digests()
        engine.update_weights(policy.full_weights(), 1)
        held, expected = engine.weight_digests(), policy.weight_digests()
    finally:
        engine.close()
    assert held == expected
    assert before != held


def test_the_digests_of_a_large_model_are_those_of_its_own_weights(model_folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("astuner.llm_engine.embedded.fast_forward._FUSE_PARAMETERS", 0)  # weights are not concatenated
    model = load_causal_lm(str(model_folder), torch.float32)
    engine = EmbeddedEngine(model, max_model_len=64)
    try:
        assert engine.weight_digests() == weight_digests(model.state_dict().items())
    finally:
        engine.close()


def test_a_digest_depends_on_every_bit_and_on_the_order_of_rows():
    weights: dict[str, Any] = {"a": torch.randn(5, 7), "b": torch.randn(7), "c": torch.tensor(2.0)}
    digests = weight_digests(weights.items())
    for name, tensor in weights.items():
        changed = tensor.clone()
        changed.view(torch.int32).view(-1)[-1] ^= 1
        assert weight_digests([(name, changed)])[name] != digests[name]
    assert weight_digests([("a", weights["a"].flip(0))])["a"] != digests["a"]


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, torch.int32), (torch.bfloat16, torch.int16)])
@pytest.mark.parametrize("size", [1, 35, 4096, 2**18 + 5])
def test_any_changed_bit_of_a_large_weight_changes_its_digest(size: int, dtype: torch.dtype, bits: torch.dtype):
    weight = torch.randn(size).to(dtype)
    digest = weight_digests([("w", weight)])
    for place in {0, size // 2, size // 3, size - 1}:
        for flip in (1, 1 << 9, -(2 ** (8 * weight.element_size() - 1))):  # the last is the sign
            changed = weight.clone()
            changed.view(bits)[place] ^= flip
            assert weight_digests([("w", changed)]) != digest, (place, flip)
    # Neither the memory around a weight nor its precision before rounding matters.
    shifted = torch.cat([torch.zeros(1, dtype=dtype), weight])[1:]
    assert weight_digests([("w", shifted)]) == digest
    assert weight_digests([("w", weight.double())], dtype) == digest


def test_checks_take_one_percent_of_the_time_after_the_first_two():
    now = 0.0
    certificate = SyncCertificate(torch.float32, clock=lambda: now)
    checked = []
    for step in range(400):
        if certificate.is_due:
            checked.append(step)
            with certificate.timed():
                now += 0.5
        now += 1.0
    assert checked[:2] == [0, 1]
    assert [after - before for before, after in pairwise(checked[1:])] == [50] * 7
    # A step of 100 times the check has it every time.
    now += 49.0
    assert certificate.is_due


def test_logprobs_that_are_not_numbers_fail():
    with pytest.raises(BackboneError, match=r"first weight sync: engine 2 does not sample .* differ by nan nats"):
        SyncCertificate(torch.float32).check_logprobs("engine 2", 0, [float("nan")], [0.0])
