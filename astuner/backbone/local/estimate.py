"""How much memory a run will take, before it is started."""

from __future__ import annotations

import torch

from astuner.backbone.base import MemoryEstimate
from astuner.backbone.memory import engine_memory, model_shape
from astuner.config.root import AstunerConfig

# Tensors of the size of the hidden state that a decoder layer keeps for its backward pass, attention and
# gated MLP together; with gradient checkpointing only the layer's input stays.
_KEPT_PER_LAYER = 16


def estimate_memory(config: AstunerConfig, model_path: str) -> MemoryEstimate:
    """Estimate the peak memory of the local backbone from shapes alone; no weights are loaded.

    Raises:
        ModelError: `model_path` has no readable configuration.
    """
    shape = model_shape(config, model_path)
    parameters, width, text = shape.parameters, shape.width, shape.text
    trained = _lora_parameters(shape.model, config.model.lora.rank) if config.model.lora.rank else parameters
    frozen_width = width if config.model.lora.rank else 4
    supervised = config.trainer_common.algorithm.adv_estimator == "sft"
    uses_reference = (config.trainer_common.use_kl_loss or config.trainer_common.algorithm.use_kl_in_reward) and not (
        supervised or config.model.lora.rank
    )
    tokens = max(config.trainer_common.max_tokens_per_micro_batch, 1)
    per_layer = 1 if config.model.gradient_checkpointing else _KEPT_PER_LAYER
    hidden, layers = text.hidden_size, text.num_hidden_layers
    parts = {
        "weights": parameters * frozen_width + (trained * 4 if config.model.lora.rank else 0),
        "gradients": trained * 4,
        "optimiser (AdamW)": trained * 8,
        "reference model": parameters * width if uses_reference else 0,
        "activations of a micro-batch": tokens * hidden * layers * per_layer * width,
        "logits of a micro-batch": tokens * text.vocab_size * 4 * 3,
    }
    if not supervised:
        parts |= engine_memory(config, shape)
        if config.model.lora.rank:
            parts["adapters merged, on their way to the engine"] = parameters * width
    return MemoryEstimate(parameters, trained, parts, shape.available)


def _lora_parameters(model: torch.nn.Module, rank: int) -> int:
    """Count the weights of adapters on all linear layers but the head."""
    linear = [
        layer for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear) and "head" not in name
    ]
    return sum(rank * (layer.in_features + layer.out_features) for layer in linear)
