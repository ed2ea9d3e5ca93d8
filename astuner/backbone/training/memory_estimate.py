"""Estimates of the peak memory of a run from the shape of its model, without loading weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psutil
import torch

from astuner.backbone.base import MemoryEstimate
from astuner.config.root import AstunerConfig
from astuner.errors import ModelError
from astuner.llm_engine.causal_lm import choose_device, compute_dtype

# Activations of a decoder layer (attention and gated MLP) that its backward pass needs, in sizes of the hidden state.
# With gradient checkpointing, only the layer's input is stored.
_ACTIVATIONS_PER_LAYER = 16


@dataclass(frozen=True)
class ModelShape:
    """The shape of a model.

    Attributes:
        model: the model on PyTorch's meta device, without weights.
        text: the transformers configuration of its language model.
        parameters: number of distinct weights; tied weights count once.
        width: bytes of a weight in the dtype that the model computes in.
        device: the device that it would be loaded to.
    """

    model: torch.nn.Module
    text: Any
    parameters: int
    width: int
    device: torch.device

    @property
    def available(self) -> int:
        """Memory of the device in bytes."""
        if self.device.type == "cuda":
            return int(torch.cuda.get_device_properties(self.device).total_memory)
        return int(psutil.virtual_memory().total)


def model_shape(config: AstunerConfig, model_path: str) -> ModelShape:
    """Read the shape of a model.

    Raises:
        ModelError: `model_path` has no readable configuration.
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    device = choose_device(config.trainer_common.device)
    try:
        shape = AutoConfig.from_pretrained(model_path)
        with init_empty_weights():
            model = AutoModelForCausalLM.from_config(shape)
        model.tie_weights()  # loading on the meta device gives tied weights a tensor each
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"model.path {model_path!r} cannot be read by transformers: {error}") from error
    width = torch.empty((), dtype=compute_dtype(config.model.dtype, device)).element_size()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return ModelShape(model, shape.get_text_config(), parameters, width, device)


def engine_memory(config: AstunerConfig, shape: ModelShape) -> dict[str, int]:
    """Return the bytes that the embedded engine needs for its weights and for its key-value cache."""
    text = shape.text
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    cached = config.rollout.max_num_seqs * config.rollout.max_model_len
    return {
        "engine: weights": shape.parameters * shape.width,
        "engine: key-value cache, at most": cached * text.num_hidden_layers * heads * head_dim * 2 * shape.width,
    }


def estimate_training_memory(config: AstunerConfig, model_path: str) -> MemoryEstimate:
    """Estimate the peak memory of a run that trains and samples in one process; no weights are loaded.

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
    per_layer = 1 if config.model.gradient_checkpointing else _ACTIVATIONS_PER_LAYER
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
            parts["weights with adapters merged, for the engine"] = parameters * width
    return MemoryEstimate(parameters, trained, parts, shape.available)


def _lora_parameters(model: torch.nn.Module, rank: int) -> int:
    """Return the number of adapter weights, on all linear layers except the head."""
    linear = [
        layer for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear) and "head" not in name
    ]
    return sum(rank * (layer.in_features + layer.out_features) for layer in linear)
