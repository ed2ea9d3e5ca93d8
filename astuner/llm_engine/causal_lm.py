"""Loads a causal language model: its device, its dtype and its weights."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from loguru import logger

from astuner.errors import BackboneError, ModelError, first_line
from astuner.llm_engine.cpu_linear import multiplies_bfloat16


def choose_device(device: str) -> torch.device:
    """Return the device of a `trainer_common.device`: `auto`, `cpu` or `cuda`.

    Raises:
        BackboneError: `device` is `cuda`, and there is no CUDA device.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise BackboneError("trainer_common.device is cuda, but PyTorch sees no CUDA device; use device: auto or cpu")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)


def compute_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Return the dtype of a `model.dtype`. Log a warning if the processor is slow with it.

    On CUDA, `auto` and `fastest` are bfloat16. On a CPU, `auto` is float32, and `fastest` is bfloat16 if the processor
    has instructions for it.
    """
    if device.type == "cuda":
        return torch.float32 if dtype == "float32" else torch.bfloat16
    is_fast = multiplies_bfloat16()
    if dtype == "bfloat16" and not is_fast:
        _warn_of_slow_bfloat16()
    return torch.bfloat16 if dtype == "bfloat16" or (dtype == "fastest" and is_fast) else torch.float32


@cache
def _warn_of_slow_bfloat16() -> None:
    logger.warning(
        "model.dtype is bfloat16, and this processor has no instructions for it, so a run takes several times as long "
        "as in float32; set model.dtype to float32, or to fastest, which is bfloat16 only where that is faster"
    )


def load_causal_lm(path: str, dtype: torch.dtype) -> Any:
    """Load an `AutoModelForCausalLM`.

    Raises:
        ModelError: `path` is not a model, or weights are missing or have the wrong shape. transformers would
            initialise those at random.
    """
    from transformers import AutoModelForCausalLM

    advice = "Expected a folder with config.json and all weights, or the name of a model on Hugging Face."
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
    # Corrupt files make safetensors, pickle and transformers raise exceptions of many types.
    except Exception as error:
        raise ModelError(
            f"model.path {path!r} cannot be loaded as a causal language model: {first_line(error)}. {advice}"
        ) from error
    mismatches = [
        f"{name} has shape {tuple(shape)}, config.json requires {tuple(expected)}"
        for name, shape, expected in sorted(report["mismatched_keys"])
    ]
    mismatches += [f"{name} is missing" for name in sorted(report["missing_keys"])]
    if mismatches:
        more = f" (and {len(mismatches) - 1} more)" if len(mismatches) > 1 else ""
        raise ModelError(f"model.path {path!r}: weights do not fit config.json: {mismatches[0]}{more}. {advice}")
    return model
