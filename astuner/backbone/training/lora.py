"""Low-rank adapters on a causal language model (LoRA: Hu et al. 2021, arXiv:2106.09685)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from astuner.config.model import LoraConfig
from astuner.errors import ModelError


def with_lora(base: Any, lora: LoraConfig) -> Any:
    """Return a transformers model with LoRA adapters on frozen weights; ModelError if it lacks the target modules."""
    from peft import LoraConfig as PeftLora
    from peft import get_peft_model

    settings = PeftLora(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        task_type="CAUSAL_LM",
    )
    try:
        return get_peft_model(base, settings)
    except ValueError as error:
        raise ModelError(
            f"model.lora.target_modules {lora.target_modules!r} does not fit this model: {error}"
        ) from error


def check_target_modules(lora: LoraConfig, model_path: str) -> None:
    """Raise ModelError if a model lacks the target modules of LoRA. Its weights are not loaded."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if not lora.rank or lora.target_modules == "all-linear":
        return
    with torch.device("meta"):
        with_lora(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_path)), lora)


def merged_weights(model: Any) -> Mapping[str, Tensor]:
    """Return all weights of a model that `with_lora` returned, adapters merged in, under the base model's names."""
    return dict(iterate_merged(model))


@torch.no_grad()
def iterate_merged(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield each entry in `merged_weights` as its name and tensor, one merged weight at a time."""
    base = model.get_base_model()
    adapted = {name: module for name, module in base.named_modules() if hasattr(module, "get_delta_weight")}
    for name, tensor in base.state_dict().items():
        layer, is_base, kind = name.rpartition(".base_layer.")
        if is_base and kind == "weight":
            # Out of place: merging adapters in and out again would accumulate rounding errors in the weights.
            delta = adapted[layer].get_delta_weight("default")
            yield f"{layer}.weight", (tensor.float() + delta.float()).to(tensor.dtype)
        elif "lora_" not in name:
            yield name.replace(".base_layer", ""), tensor.detach()
