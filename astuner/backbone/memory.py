"""What a model takes in memory, from its shape alone, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psutil
import torch

from astuner.backbone.causal_lm import choose_device, compute_dtype
from astuner.config.root import AstunerConfig
from astuner.errors import ModelError


@dataclass(frozen=True)
class ModelShape:
    """A model without its weights.

    Attributes:
        model: on PyTorch's meta device.
        text: the configuration of its language model.
        parameters: number of weights.
        width: bytes of a weight in the type that the model computes in.
        device: where it would be.
    """

    model: torch.nn.Module
    text: Any
    parameters: int
    width: int
    device: torch.device

    @property
    def available(self) -> int:
        """Bytes that the device has."""
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
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"model.path {model_path!r} is no model that transformers knows: {error}") from error
    width = torch.empty((), dtype=compute_dtype(config.model.dtype, device)).element_size()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return ModelShape(model, shape.get_text_config(), parameters, width, device)


def engine_memory(config: AstunerConfig, shape: ModelShape) -> dict[str, int]:
    """Return the bytes that the embedded engine takes, by what they are for."""
    text = shape.text
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    cached = config.rollout.max_num_seqs * config.rollout.max_model_len
    return {
        "engine: weights": shape.parameters * shape.width,
        "engine: key-value cache, at most": cached * text.num_hidden_layers * heads * head_dim * 2 * shape.width,
    }
