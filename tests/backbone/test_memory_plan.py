"""The memory of a GPU that `astuner check --machine` prints agrees with traces of an update on fake tensors."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from astuner.backbone.base import MemoryEstimate
from astuner.backbone.local.memory import local_plan
from astuner.backbone.trinity.machine_plan import trinity_plan
from astuner.backbone.verl.machine_plan import verl_plan
from astuner.config.loading import with_values
from astuner.config.root import RunConfig
from astuner.errors import ConfigError
from astuner.system.gpus import Machine

QWEN3_600M = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
QWEN25_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
H100S = Machine(8, "H100", 80 * 2**30)
LAYERS = (2, 4, 28)
"""Numbers of layers. The first two models are traced; the trace of the last takes most of a minute."""


def expected_peaks(peaks: dict[int, int]) -> dict[int, int]:
    """Return the peak of the larger traced model, and that of the last: each layer adds as much as between the traced.

    A trace of 28 layers has this peak to the byte.
    """
    few, some, many = LAYERS
    return {some: peaks[some], many: peaks[some] + (peaks[some] - peaks[few]) // (some - few) * (many - some)}


class FlashAttention(torch.autograd.Function):
    """The tensors of flash-attention's forward and backward pass, without values."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, output, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def attention(_: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> tuple[Tensor, None]:
    return FlashAttention.apply(query, key, value).transpose(1, 2), None  # type: ignore[no-untyped-call]


ALL_ATTENTION_FUNCTIONS.register("traced", attention)


def write_config(folder: Path, values: dict[str, Any]) -> str:
    """Write a config.json without weights and tokenizer."""
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder)


def run_config(**values: object) -> RunConfig:
    keys = {f"astuner.{name.replace('__', '.')}": value for name, value in values.items()}
    return with_values(RunConfig(), keys)


def planned(path: str, machine: Machine = H100S, **values: object) -> list[MemoryEstimate]:
    """Return the estimates for a run on verl or trinity."""
    config = run_config(**values)
    return (verl_plan if config.astuner.backbone == "verl" else trinity_plan)(config, {}, path, machine)


def traced_model(path: str, *, checkpointing: bool) -> Any:
    """Return the model in float32 on fake tensors."""
    config = AutoConfig.from_pretrained(path)
    config._attn_implementation = "traced"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if checkpointing:
        model.activation_checkpointing_enable()
    return model.train()


def sharded_model(path: str, mesh: Any, *, checkpointing: bool) -> Any:
    """Return the model on fake tensors, with its layers sharded as verl's workers shard them."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = traced_model(path, checkpointing=checkpointing)
    for module in (*model.model.layers, model.model.embed_tokens, model):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    return model


@contextlib.contextmanager
def traced_memory(model: Any, *, has_gradients: bool = True) -> Iterator[list[int]]:
    """Append to the list the peak of all tensors in the block, with the model and its optimizer."""
    from torch.distributed._tools.mem_tracker import MemTracker

    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if has_gradients else None
        optimizer.state[parameter] = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
    tracker = MemTracker()
    tracker.track_external(model, optimizer)  # the gradients are those of an earlier micro-batch
    peak: list[int] = []
    with tracker:
        yield peak
    peak.append(sum(values["Total"] for values in tracker.get_tracker_snapshot("peak").values()))


def estimated(estimate: MemoryEstimate, *without: str, phase: str = "update") -> int:
    """Return the estimate of a phase without what the trace does not contain."""
    parts = estimate.phases[phase]
    return sum(part.size for part in parts if part.name not in without)


def test_an_update_on_one_gpu_agrees_with_a_trace(tmp_path: Path):
    from torch._subclasses.fake_tensor import FakeTensorMode

    tokens = 8192
    config = run_config(
        backbone="local",
        update__pack="none",
        rollout__max_model_len=tokens,
        rollout__temperature=1.0,
        data__max_prompt_length=2048,
        trainer_common__max_tokens_per_micro_batch=tokens,
        trainer_common__use_kl_loss=False,
    )
    estimates, peaks = {}, {}
    for layers in LAYERS:
        path = write_config(tmp_path, QWEN3_600M | {"num_hidden_layers": layers})
        (estimates[layers],) = local_plan(config.astuner, path, Machine(1, "H100", 80 * 2**30))
        if layers == LAYERS[-1]:
            break
        with FakeTensorMode():
            model = traced_model(path, checkpointing=False)
            with traced_memory(model) as peak, torch.autocast("cpu", torch.bfloat16):
                ids = torch.zeros((1, tokens), dtype=torch.int64)
                # As `token_logprobs` of the local backbone holds them, whose indices depend on the data.
                logits = model(input_ids=ids, logits_to_keep=tokens - 2048, use_cache=False).logits.flatten(0, 1)
                logits.backward(torch.empty_like(logits))
        (peaks[layers],) = peak
    engine = ("CUDA context and kernels", "engine: weights", "engine: joined weights")
    for layers, size in expected_peaks(peaks).items():
        assert estimated(estimates[layers], *engine) == pytest.approx(size, rel=0.1), layers


@pytest.fixture
def eight_gpus() -> Iterator[Any]:
    """The first of eight processes that exchange nothing."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield init_device_mesh("cpu", (8,))
    torch.distributed.destroy_process_group()


def test_an_update_of_sharded_weights_agrees_with_a_trace(tmp_path: Path, eight_gpus: Any):
    from torch._subclasses.fake_tensor import FakeTensorMode

    tokens = 32768
    config = run_config(
        backbone="verl",
        model__gradient_checkpointing=True,
        rollout__max_model_len=tokens,
        rollout__tensor_model_parallel_size=2,
        trainer_common__max_tokens_per_micro_batch=tokens,
        trainer_common__use_kl_loss=False,
    )
    estimates, peaks = {}, {}
    for layers in LAYERS:
        path = write_config(tmp_path, QWEN25_7B | {"num_hidden_layers": layers})
        (estimates[layers],) = verl_plan(config, {}, path, H100S)
        if layers == LAYERS[-1]:
            break
        with FakeTensorMode():
            model = sharded_model(path, eight_gpus, checkpointing=True)
            with traced_memory(model) as peak:
                ids = torch.zeros((1, tokens), dtype=torch.int64)
                # As verl's `logprobs_from_logits` computes them.
                logits = model(input_ids=ids, use_cache=False).logits[0]
                logprobs = torch.log_softmax(logits, dim=-1)
                del logits
                chosen = logprobs.gather(-1, ids[0, :, None])
                del logprobs
                chosen.sum().backward()
        (peaks[layers],) = peak
    for layers, size in expected_peaks(peaks).items():
        assert estimated(estimates[layers], "CUDA contexts and kernels") == pytest.approx(size, rel=0.1), layers
        engine = {part.name: part.size for part in estimates[layers].phases["rollout"]}
        assert engine["engine: weights"] == estimates[layers].parameters  # two bytes each, on two GPUs


def test_the_logprobs_of_sharded_weights_agree_with_a_trace(tmp_path: Path, eight_gpus: Any):
    from torch._subclasses.fake_tensor import FakeTensorMode

    tokens = 32768
    config = run_config(
        backbone="verl",
        rollout__max_model_len=tokens,
        trainer_common__max_tokens_per_micro_batch=tokens,
        trainer_common__use_kl_loss=False,
    )
    path = write_config(tmp_path, QWEN25_7B | {"num_hidden_layers": 4})
    (estimate,) = verl_plan(config, {}, path, H100S)
    with FakeTensorMode():
        model = sharded_model(path, eight_gpus, checkpointing=False)
        with traced_memory(model, has_gradients=False) as peak, torch.no_grad():
            ids = torch.zeros((1, tokens), dtype=torch.int64)
            logits = model(input_ids=ids, use_cache=False).logits[0]
            torch.log_softmax(logits, dim=-1).gather(-1, ids[0, :, None])
    assert estimated(estimate, "CUDA contexts and kernels", phase="log-probs") == pytest.approx(peak[0], rel=0.1)


@pytest.fixture
def small(tmp_path: Path) -> str:
    return write_config(tmp_path, QWEN3_600M | {"num_hidden_layers": 2})


def sizes(estimate: MemoryEstimate, phase: str) -> dict[str, int]:
    return {part.name: part.size for part in estimate.phases[phase]}


def test_every_phase_of_every_backbone_has_its_parts(small: str):
    (local,) = local_plan(run_config(backbone="local").astuner, small, H100S)
    (verl,) = planned(small, backbone="verl")
    trainer, engines = planned(small, backbone="trinity", rollout__n_vllm_engine=2)
    phases = {"rollout", "log-probs", "update", "sync", "checkpoint"}
    assert phases == set(local.phases) == set(verl.phases) == set(trainer.phases)
    assert set(engines.phases) == {"rollout", "sync"}
    assert "each of 6 GPUs" in trainer.device
    # The weights, gradients and moments are divided among all GPUs of the trainer.
    for estimate, gpus in ((verl, 8), (trainer, 6)):
        update = sizes(estimate, "update")
        assert update["weights"] == update["gradients"] == -(-estimate.parameters * 4 // gpus)
        assert update["optimizer (AdamW)"] == -(-estimate.parameters * 8 // gpus)
    # The engine of verl sleeps during the update; Trinity's engines have their own GPUs.
    assert not any(name.startswith("engine") for name in sizes(verl, "update") | sizes(trainer, "rollout"))
    engine = sizes(verl, "rollout")
    assert engine["engine: weights"] + engine["engine: key-value cache"] == H100S.memory // 2


def test_offloaded_weights_are_on_the_gpu_only_while_they_are_used(small: str):
    keys = {f"trainer_common__fsdp_config__{part}_offload": False for part in ("param", "optimizer")}
    (offloaded,) = planned(small, backbone="verl")
    (resident,) = planned(small, backbone="verl", **keys)
    assert not {"weights", "optimizer (AdamW)"} & sizes(offloaded, "rollout").keys()
    assert {"weights", "optimizer (AdamW)"} <= sizes(resident, "rollout").keys()
    assert sizes(offloaded, "update") == sizes(resident, "update")
    assert resident.host == 0
    assert offloaded.host == pytest.approx(offloaded.parameters * 12, rel=1e-3)


def test_an_engine_without_room_for_a_sequence_is_a_problem(small: str):
    (estimate,) = planned(small, Machine(8, "tiny", 2**28), backbone="verl")
    assert len(estimate.problems) == 1
    assert "raise rollout.gpu_memory_utilization or rollout.tensor_model_parallel_size" in estimate.problems[0]


def test_gpus_that_a_run_cannot_divide_are_errors(small: str):
    with pytest.raises(ConfigError, match="tensor_model_parallel_size is 3, which does not divide the 8 GPUs"):
        planned(small, backbone="verl", rollout__tensor_model_parallel_size=3)
    with pytest.raises(ConfigError, match="= 8 of 8 GPUs, which leaves none for the trainer"):
        planned(small, backbone="trinity", rollout__n_vllm_engine=8)
    with pytest.raises(ConfigError, match="n_gpus_per_node is 16, and --machine has 8 GPUs"):
        planned(small, backbone="verl", trainer_common__n_gpus_per_node=16)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model__dtype": "float32"}, "astuner.model.dtype is 'float32', and Trinity's trainer uses bfloat16"),
        (
            {"trainer_common__ulysses_sequence_parallel_size": 4},
            "is 4, which does not divide the 6 GPUs of the trainer",
        ),
        ({"trainer_common__ulysses_sequence_parallel_size": 3}, "is 3, which does not divide the model's 16 attention"),
        (
            {"rollout__tensor_model_parallel_size": 3},
            "is 3, which does not divide the model's 16 attention heads",
        ),
        ({"trainer_common__nnodes": 2, "rollout__n_vllm_engine": 3}, "leaves 13 for the trainer, which needs whole"),
        ({"trainer_common__n_gpus_per_node": 1}, "too few GPUs (1)"),
        ({"rollout__max_env_worker": 1}, "max_env_worker is 1, less than astuner.rollout.n_vllm_engine (2)"),
    ],
)
def test_what_trinity_refuses_is_an_error_for_a_described_machine(small: str, settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        planned(small, backbone="trinity", **({"rollout__n_vllm_engine": 2} | settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trainer_common__ulysses_sequence_parallel_size": 3}, "is 3, which does not divide the 8 GPUs of nnodes"),
        ({"rollout__top_p": 0.9, "rollout__temperature": 0.5}, "top_p requires a temperature of 1 on vLLM"),
        (
            {"update__pack": "tree", "trainer_common__ulysses_sequence_parallel_size": 2},
            "update.pack is tree, and astuner.trainer_common.ulysses_sequence_parallel_size is above 1",
        ),
    ],
)
def test_what_verl_refuses_is_an_error_for_a_described_machine(small: str, settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        planned(small, backbone="verl", **settings)


def test_several_described_machines_are_planned_as_a_cluster(small: str):
    (verl,) = planned(small, backbone="verl", trainer_common__nnodes=2)
    assert "each of 16 GPUs" in verl.device
    trainer, _ = planned(small, backbone="trinity", trainer_common__nnodes=2, rollout__n_vllm_engine=8)
    assert "each of 8 GPUs of the trainer" in trainer.device


def test_adapters_on_trinity_are_planned_for_one_gpu(small: str):
    settings = {"backbone": "trinity", "model__lora__rank": 8, "rollout__max_model_len": 4096}
    (server,) = planned(small, Machine(1, "H100", 80 * 2**30), **settings)
    assert (server.phases, server.device) == (planned(small, **settings)[0].phases, server.device)
    assert "one GPU (a Tinker server" in server.device
    update = sizes(server, "update")
    assert server.trained < server.parameters / 10
    assert update["weights"] == server.parameters * 2 + server.trained * 4
    assert update["engine: weights"] == server.parameters * 2
    assert update["gradients"] == server.trained * 4
    # A sequence that is longer than the limit of a batch is one batch.
    assert update["logits of a batch"] == 4096 * QWEN3_600M["vocab_size"] * 12


def test_a_model_at_a_tinker_service_needs_no_gpu(small: str):
    config = run_config(backbone="trinity").model_copy(
        update={"trinity": {"model": {"tinker": {"base_url": "http://127.0.0.1:1"}}}}
    )
    with pytest.raises(ConfigError, match="base_url is set, so the model is at that service"):
        trinity_plan(config, {}, small, H100S)


@pytest.mark.parametrize("backbone", ["verl", "trinity"])
def test_weights_are_sharded_over_fsdp_size_gpus(small: str, backbone: str):
    plan, gpus = (verl_plan, 8) if backbone == "verl" else (trinity_plan, 4)
    parent = "actor_rollout_ref" if backbone == "verl" else "trainer.trainer_config"
    config = run_config(backbone=backbone, rollout__n_vllm_engine=4, trainer_common__use_kl_loss=True)

    def weights(**sizes_by_role: object) -> tuple[int, int]:
        section = {f"{parent}.{role}.fsdp_config.fsdp_size": size for role, size in sizes_by_role.items()}
        estimate = plan(config.model_copy(update={backbone: section}), {}, small, H100S)[0]
        update = sizes(estimate, "update")
        return update["weights"], update["reference model"]

    whole, reference = weights()
    assert weights(actor=2) == (whole * gpus // 2, reference)
    assert weights(ref=2) == (whole, reference * gpus // 2)
    assert weights(actor=-1) == weights(actor=16) == (whole, reference)
    for wrong in (3, 0, "one"):
        name = f"{backbone}.{parent}.actor.fsdp_config.fsdp_size is {wrong!r}"
        with pytest.raises(ConfigError, match=re.escape(name)):
            weights(actor=wrong)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8xH100-80G", Machine(8, "H100", 80 * 2**30)),
        ("1xL4-24GiB", Machine(1, "L4", 24 * 2**30)),
        ("2xRTX_4090-23.5g", Machine(2, "RTX_4090", int(23.5 * 2**30))),
    ],
)
def test_machines_are_described_by_number_type_and_memory(text: str, expected: Machine):
    assert Machine.parse(text) == expected


@pytest.mark.parametrize("text", ["", "H100", "8xH100", "0xH100-80G", "8xH100-80", "8xH100-0G", "x-G", "8 x H100-80G"])
def test_other_descriptions_are_errors(text: str):
    with pytest.raises(ConfigError, match="expected NUMBERxTYPE-MEMORYG, such as 8xH100-80G"):
        Machine.parse(text)
