"""A run stops in the step in which an engine does not have the trainer's weights, and names them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from astuner import AstunerJob
from astuner.backbone.local.policy import Policy
from astuner.backbone.training.sync_certificate import SyncCertificate
from astuner.config.model import ModelConfig
from astuner.errors import BackboneError
from astuner.llm_engine.causal_lm import load_causal_lm
from astuner.llm_engine.cpu_linear import pack, packed_memory
from astuner.llm_engine.embedded.engine import EmbeddedEngine
from astuner.llm_engine.embedded.fast_forward import FastForward
from astuner.llm_engine.embedded.kv_store import PrefixTree
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


def assert_digests_of_its_weights(model: Any) -> None:
    """Check that the checksums of an engine with a model are those of the model."""
    engine = EmbeddedEngine(model, max_model_len=64)
    try:
        assert engine.weight_digests() == weight_digests(model.state_dict().items())
    finally:
        engine.close()


def test_the_digests_of_a_large_model_are_those_of_its_own_weights(model_folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("astuner.llm_engine.embedded.fast_forward._FUSE_PARAMETERS", 0)  # weights are not concatenated
    assert_digests_of_its_weights(load_causal_lm(str(model_folder), torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_digests_of_packed_weights_are_those_of_the_model(dtype: torch.dtype):
    # Large enough for oneDNN's layout, with one projection whose parts do not end with a block of 64 rows.
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=320,
        intermediate_size=288,
        num_hidden_layers=1,
        num_attention_heads=5,
        num_key_value_heads=5,
    )
    assert_digests_of_its_weights(LlamaForCausalLM(config).to(dtype).eval())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(576, 576), (4096, 130), (1000, 200), (640, 257)])
def test_a_changed_bit_of_a_packed_weight_changes_its_digest(shape: tuple[int, int], dtype: torch.dtype):
    weight = torch.randn(shape).to(dtype)
    packed = pack(weight)
    memory = packed_memory(packed) if packed.is_mkldnn else None
    if memory is None:
        pytest.skip("oneDNN on this processor has no layout with blocks of 64 rows for this weight")
    digest = weight_digests([("w", weight)])
    assert weight_digests([("w", memory)]) == digest
    memory.view(torch.int32)[shape[0] // 2, 3] ^= 1 << 9
    assert weight_digests([("w", memory)]) != digest


def test_a_digest_depends_on_every_bit_and_on_the_order_of_blocks():
    weights: dict[str, Any] = {"a": torch.randn(5, 7), "b": torch.randn(7), "c": torch.tensor(2.0)}
    digests = weight_digests(weights.items())
    for name, tensor in weights.items():
        changed = tensor.clone()
        changed.view(torch.int32).view(-1)[-1] ^= 1
        assert weight_digests([(name, changed)])[name] != digests[name]
    rows = torch.randn(200, 3)
    swapped = torch.cat([rows[64:128], rows[:64], rows[128:]])
    assert weight_digests([("rows", swapped)]) != weight_digests([("rows", rows)])


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


def test_logprobs_are_compared_after_two_syncs_and_then_within_one_percent_of_the_time():
    now = 0.0
    certificate = SyncCertificate(torch.float32, clock=lambda: now)
    probed = []
    for step in range(400):
        with certificate.timed():
            now += 0.005
        if certificate.probe_is_due:
            probed.append(step)
            with certificate.timed_probe():
                now += 0.245
        now += 0.995
    assert probed[:2] == [0, 1]
    # Checksums take half of the 1%.
    assert all(48 <= after - before <= 51 for before, after in pairwise(probed[1:]))
    # Steps of 100 times both comparisons have them every time.
    for _ in range(10):
        now += 50.0
        assert certificate.probe_is_due
        with certificate.timed_probe():
            now += 0.245


def test_logprobs_that_are_not_numbers_fail():
    with pytest.raises(BackboneError, match=r"first weight sync: engine 2 does not sample .* differ by nan nats"):
        SyncCertificate(torch.float32).check_logprobs("engine 2", 0, [float("nan")], [0.0])
