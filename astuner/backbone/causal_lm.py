"""Loading a causal language model: its device, its type, its weights, all of which must be there."""

from __future__ import annotations

from typing import Any

import torch

from astuner.errors import BackboneError, ModelError
from astuner.model_tuner import first_line


def choose_device(wanted: str) -> torch.device:
    """Return the device to compute on.

    Raises:
        BackboneError: CUDA was asked for and there is none.
    """
    if wanted == "cuda" and not torch.cuda.is_available():
        raise BackboneError("trainer_common.device is cuda, but PyTorch sees no CUDA device; use device: auto or cpu")
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


def compute_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """Return the type that the model computes in: bfloat16 on CUDA and float32 on CPU unless told otherwise."""
    if wanted == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if wanted == "bfloat16" else torch.float32


def load_causal_lm(path: str, dtype: torch.dtype) -> Any:
    """Load an `AutoModelForCausalLM`.

    Raises:
        ModelError: `path` is no model, or lacks weights, which would be random numbers.
    """
    from transformers import AutoModelForCausalLM

    advice = "Give a whole folder with config.json and weights, or the name of a model on Hugging Face."
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
    # A file that is spoilt makes safetensors, pickle and transformers raise errors of many kinds.
    except Exception as error:
        raise ModelError(
            f"model.path {path!r} cannot be loaded as a causal language model: {first_line(error)}. {advice}"
        ) from error
    misfits = [
        f"{name} has shape {tuple(found)}, config.json says {tuple(expected)}"
        for name, found, expected in sorted(report["mismatched_keys"])
    ]
    misfits += [f"{name} is missing" for name in sorted(report["missing_keys"])]
    if misfits:
        more = f" (and {len(misfits) - 1} more)" if len(misfits) > 1 else ""
        raise ModelError(f"model.path {path!r}: weights do not fit config.json: {misfits[0]}{more}. {advice}")
    return model
