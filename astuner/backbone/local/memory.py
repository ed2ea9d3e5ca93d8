"""The estimated memory of training on one device."""

from __future__ import annotations

from dataclasses import replace

from astuner.algorithms.credit_assignment import uses_kl_loss
from astuner.backbone.base import MemoryEstimate, MemoryPart
from astuner.backbone.memory.estimate import (
    SMALLER_MODEL,
    BatchShape,
    ModelShape,
    engine_parts,
    model_shape,
    process_parts,
)
from astuner.backbone.memory.plan import gpu_model_shape, max_length
from astuner.backbone.packing.packed_attention import enable_packed_attention, supports_packing
from astuner.backbone.packing.row_bins import padded_budget
from astuner.backbone.training.run_inputs import RunInputs
from astuner.config.root import AstunerConfig
from astuner.system.gpus import Machine

_LOGITS = "logits of a micro-batch"
_ADAPTERS = f"train adapters (model.lora.rank: 16) or {SMALLER_MODEL}"
_MICRO_BATCH = "lower trainer_common.max_tokens_per_micro_batch"


def estimate_training_memory(config: AstunerConfig, run_inputs: RunInputs) -> MemoryEstimate:
    """Estimate the peak memory of a run that trains and samples in one process; no weights are loaded.

    ModelError: the model has no readable configuration, or lacks the target modules of LoRA.
    """
    return training_memory(config, model_shape(config, run_inputs.model_path), BatchShape.of(config, run_inputs))


def training_memory(config: AstunerConfig, shape: ModelShape, batch: BatchShape) -> MemoryEstimate:
    """Estimate the peak memory for a run that trains and samples in one process, with steps as described by `batch`."""
    uses_lora = config.model.lora.rank > 0
    weights = shape.parameters * shape.width + shape.trained * 4 if uses_lora else shape.parameters * 4
    held = [
        *process_parts(config, batch, shape.device),
        MemoryPart("weights", weights, SMALLER_MODEL),
        MemoryPart("optimizer (AdamW)", shape.trained * 8, _ADAPTERS),
    ]
    update = _update_parts(config, shape, batch)
    if config.is_supervised:
        return MemoryEstimate(shape.parameters, shape.trained, {"update": (*held, *update)}, shape.available)
    engine, cache = engine_parts(config, shape, batch)
    held += engine
    if uses_kl_loss(config) or config.trainer_common.algorithm.use_kl_in_reward:
        reference = 0 if uses_lora else shape.parameters * shape.width
        fix = "write trainer_common.use_kl_loss: False, or train adapters, which need no copy"
        held.append(MemoryPart("reference model", reference, fix))
    sync = []
    if shape.joins_weights:
        sync.append(MemoryPart("new joined weights", shape.layer_parameters * shape.width, SMALLER_MODEL))
    if uses_lora:
        merged = shape.layer_parameters * shape.width
        sync.append(MemoryPart("weights with adapters merged", merged, SMALLER_MODEL))
    # Without gradient, only the logits are held.
    share = shape.width / _logit_bytes(config, shape)
    without_gradient = [replace(part, size=int(part.size * share)) for part in update if part.name == _LOGITS]
    phases = {
        "rollout": (*held, cache),
        "update": (*held, *update),
        "sync": (*held, *sync),
        "log-probs": (*held, *without_gradient),
        "checkpoint": tuple(held),
    }
    return MemoryEstimate(shape.parameters, shape.trained, phases, shape.available)


def _update_parts(config: AstunerConfig, shape: ModelShape, batch: BatchShape) -> list[MemoryPart]:
    budget = config.trainer_common.max_tokens_per_micro_batch
    enable_packed_attention(shape.model.get_base_model() if config.model.lora.rank else shape.model)
    is_packed = config.update.pack != "none" and supports_packing(shape.model)
    if is_packed:
        tokens = max(min(budget, batch.distinct), batch.longest)
        rows = max(batch.rows * tokens // max(batch.distinct, 1), 1)
        copied = rows * batch.row * shape.copied_bytes
    else:
        rows = max(min(padded_budget(budget, shape.device) // batch.row, batch.rows), 1)
        tokens, copied = rows * batch.row, 0
    per_token = shape.activation_bytes
    if config.model.lora.rank and shape.device.type == "cpu":
        # glibc does not reuse the freed outputs of the adapted layers between blocks that the backward pass needs.
        adapted = (layer for layer in shape.model.modules() if hasattr(layer, "lora_A"))
        per_token += sum(layer.out_features for layer in adapted) * shape.width
    if config.model.gradient_checkpointing:
        layers = shape.text.num_hidden_layers
        per_token = layers * shape.text.hidden_size * shape.width + per_token / layers
        copied //= layers
    trained = min(rows * batch.answer, tokens)
    parts = [
        MemoryPart("gradients", shape.trained * 4, _ADAPTERS),
        MemoryPart(
            "activations of a micro-batch",
            int(tokens * per_token) + copied,
            f"{_MICRO_BATCH} or set model.gradient_checkpointing: True",
        ),
        MemoryPart(_LOGITS, trained * shape.text.vocab_size * _logit_bytes(config, shape), _MICRO_BATCH),
    ]
    if shape.width < 4 and not config.model.lora.rank:
        parts.append(MemoryPart("weights in the dtype of the computation", shape.parameters * shape.width, _ADAPTERS))
    return parts


def _logit_bytes(config: AstunerConfig, shape: ModelShape) -> int:
    if config.trainer_common.algorithm.entropy_coef > 0:
        # In float32: log-probabilities, two gradients, and the logits divided by the temperature.
        return 4 * (3 + (config.rollout.temperature not in (0.0, 1.0)))
    return 2 * shape.width  # the logits and their gradient


def local_plan(config: AstunerConfig, model_path: str, machine: Machine) -> list[MemoryEstimate]:
    """Estimate a run on one GPU of a machine, with samples as long as possible. Raises as `gpu_model_shape`."""
    shape = gpu_model_shape(config, model_path, machine, autocast=True)
    estimate = training_memory(config, shape, BatchShape.longest_of(config, max_length(config, shape)))
    return [replace(estimate, device="one GPU (trainer and engine)")]
