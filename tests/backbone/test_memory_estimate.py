"""The estimate of a run's memory agrees with what a run allocates, where that can be counted exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from astuner.backbone.base import MemoryEstimate
from astuner.backbone.local.memory import estimate_training_memory
from astuner.backbone.local.policy import Optimizer, Policy
from astuner.backbone.memory.estimate import BatchShape, engine_parts, model_shape, process_estimate
from astuner.backbone.training.run_inputs import RunInputs
from astuner.config.loading import with_values
from astuner.config.root import AstunerConfig, RunConfig
from astuner.llm_engine.embedded.fast_forward import FastForward
from astuner.model_tuner.codec import ChatCodec
from astuner.schema import Task, TaskSet
from tests.llm_engine.embedded.tiny_models import gemma2, gpt2, mamba, opt

CPU = torch.device("cpu")
BATCH = BatchShape(groups=4, rows=32, prompt=30, answer=10, longest=50, episodes=64, concurrent=16)


def save_model(folder: Path, *, tied: bool = True) -> str:
    config = Qwen3Config(
        vocab_size=97,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return str(folder)


def run_config(**values: object) -> AstunerConfig:
    keys = {"trainer_common.device": "cpu", **{name.replace("__", "."): value for name, value in values.items()}}
    return with_values(RunConfig(), {f"astuner.{name}": value for name, value in keys.items()}).astuner


@pytest.fixture
def estimate(model_folder: Path, tokenizer: Any):
    """Estimate the memory of a run on 100 tasks."""
    tasks = tuple(Task(str(number), f"What is {number} + 1?") for number in range(100))
    codec = ChatCodec(tokenizer, "qwen3")
    inputs = RunInputs(TaskSet(tasks, tasks[:10]), str(model_folder), tokenizer, codec)
    return lambda **values: estimate_training_memory(run_config(**values), inputs)


def sizes(estimate: MemoryEstimate, phase: str = "update") -> dict[str, int]:
    return {part.name: part.size for part in estimate.phases[phase]}


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_the_loaded_model(tmp_path: Path, tied: bool):
    model = AutoModelForCausalLM.from_pretrained(save_model(tmp_path, tied=tied))
    shape = model_shape(run_config(), str(tmp_path))
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    embeddings = 97 * 16 * (1 if tied else 2)
    assert shape.layer_parameters == shape.parameters - embeddings


@pytest.mark.parametrize("model", [opt, mamba, gpt2, gemma2])
def test_models_of_other_architectures_are_estimated(tmp_path: Path, model: Callable[[], Any]):
    original = model()
    original.save_pretrained(tmp_path)
    shape = model_shape(run_config(), str(tmp_path))
    assert shape.parameters == sum(parameter.numel() for parameter in original.parameters())
    hidden = shape.text.num_hidden_layers * shape.text.hidden_size * shape.width
    assert 8 * hidden < shape.activation_bytes < 60 * hidden
    batch = BATCH
    assert engine_parts(run_config(), shape, batch)[1].size >= 0


@pytest.mark.parametrize("modules", ["all-linear", ["q_proj", "v_proj"], ["down_proj"]])
def test_adapters_are_those_that_a_run_trains(tmp_path: Path, modules: object):
    config = run_config(model__lora__rank=4, model__lora__target_modules=modules)
    policy = Policy(config.model, save_model(tmp_path), CPU)
    assert model_shape(config, str(tmp_path)).trained == sum(weight.numel() for weight in policy.trainable())


def test_weights_gradients_and_optimizer_are_those_of_a_policy(model_folder: Path, estimate: Any):
    config = run_config()
    policy = Policy(config.model, str(model_folder), CPU)
    optimizer = Optimizer(policy.trainable(), config.trainer_common.optim, 1)
    for weight in policy.trainable():
        weight.grad = torch.ones_like(weight)
    gradients = sum(weight.grad.nbytes for weight in policy.trainable() if weight.grad is not None)
    optimizer.step(1)
    moments = [state[name] for state in optimizer.state()["state"].values() for name in ("exp_avg", "exp_avg_sq")]
    parts = sizes(estimate())
    assert parts["weights"] == sum(weight.nbytes for weight in policy.model.parameters())
    assert parts["gradients"] == gradients
    assert parts["optimizer (AdamW)"] == sum(moment.nbytes for moment in moments)


@pytest.mark.parametrize("rank", [0, 4])
def test_activations_are_those_that_a_forward_pass_keeps(tmp_path: Path, rank: int):
    config = run_config(model__lora__rank=rank)
    policy = Policy(config.model, save_model(tmp_path), CPU, "none")
    model = policy.model.get_base_model() if rank else policy.model
    kept: dict[int, torch.UntypedStorage] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model.model(input_ids=torch.zeros((4, 64), dtype=torch.int64), use_cache=False)
    counted = sum(storage.nbytes() for storage in kept.values()) / (4 * 64)
    assert output.last_hidden_state.requires_grad
    # The count has a dense mask, and the attention kernel of a CPU keeps a few additional numbers per token.
    assert model_shape(config, str(tmp_path)).activation_bytes == pytest.approx(counted, rel=0.05)


def test_the_engine_keeps_the_weights_and_joined_copies_of_small_models(tmp_path: Path):
    config = run_config()
    path = save_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(path)
    shape = model_shape(config, path)
    parts, cache = engine_parts(config, shape, BATCH)
    joined = FastForward(model, 64)
    held = [joined._embedding, joined._final_norm]
    for layer in joined._layers:
        held += [layer.attention_norm, layer.mlp_norm]
        held += [weight for part in (layer.qkv, layer.output, layer.gate_up, layer.down) for weight, _ in part]
    assert [part.name for part in parts] == ["engine: weights", "engine: joined weights"]
    in_heads = sum(weight.numel() for name, weight in model.named_parameters() if "q_norm" in name or "k_norm" in name)
    assert parts[1].size == sum(tensor.nbytes for tensor in held) + 4 * in_heads
    assert cache.size == (16 * 40 + (4 * 30 + 32 * 10)) * joined.kv_shape.bytes_per_token
    large = replace(shape, joins_weights=False)
    assert [part.name for part in engine_parts(config, large, BATCH)[0]] == ["engine: weights"]


@pytest.mark.parametrize(
    ("values", "held"),
    [
        ({}, True),
        ({"trainer_common__kl_loss_coef": 0.0}, False),
        ({"trainer_common__use_kl_loss": False}, False),
        ({"trainer_common__use_kl_loss": False, "trainer_common__algorithm__use_kl_in_reward": True}, True),
        ({"model__lora__rank": 4}, False),
    ],
)
def test_a_reference_model_counts_where_a_run_loads_one(values: dict[str, object], held: bool, estimate: Any):
    assert (sizes(estimate(**values)).get("reference model", 0) > 0) is held


def test_padded_micro_batches_of_a_cpu_end_at_their_own_limit(estimate: Any):
    long = {"rollout__max_response_length_in_one_turn": 400, "update__pack": "none"}
    activations = [
        sizes(estimate(trainer_common__max_tokens_per_micro_batch=budget, **long))["activations of a micro-batch"]
        for budget in (2048, 4096, 65536)
    ]
    assert activations[0] < activations[1] == activations[2]


def test_a_small_step_does_not_fill_a_micro_batch(estimate: Any):
    small, large = (
        sizes(estimate(data__train_batch_size=batch, rollout__num_repeat=2))["logits of a micro-batch"]
        for batch in (1, 2)
    )
    assert large == 2 * small


def test_worker_processes_are_counted(estimate: Any):
    inline = estimate(backbone="debug", debug__debug_max_parallel=1)
    few, many = (estimate(backbone="local", rollout__max_env_worker=workers) for workers in (4, 8))
    assert "episode workers" not in sizes(inline)
    a_worker = (sizes(many)["episode workers"] - sizes(few)["episode workers"]) / 4
    assert 15e6 < a_worker < 40e6
    assert 150e6 < sizes(few)["episode workers"] - 4 * a_worker < 400e6


def test_the_peak_is_the_phase_that_needs_most(estimate: Any):
    many = estimate(trainer_common__max_tokens_per_micro_batch=64)
    assert many.peak == max(many.phases, key=lambda phase: sum(sizes(many, phase).values()))
    assert many.total == sum(sizes(many, many.peak).values())
    assert estimate(trainer_common__algorithm__adv_estimator="grpo").available > 0


def test_episodes_of_a_step_or_a_validation_are_held():
    few, many = (
        process_estimate(run_config(), replace(BATCH, episodes=episodes), excluded="workers")
        for episodes in (0, 10**30)
    )
    assert {part.name: part.size for part in few.parts}["episodes"] == 0
    assert many.total > many.available
    assert few.total < few.available
