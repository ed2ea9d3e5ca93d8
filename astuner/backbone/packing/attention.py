"""Attention implementations of transformers, and the packages that they need."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator

from astuner.config.root import AstunerConfig
from astuner.errors import did_you_mean

_PACKAGES = {
    "flash_attention_2": ("flash_attn", "flash-attn"),
    "flash_attention_3": ("flash_attn_interface", "flash-attn-3"),
}


def imports_flash_attention() -> bool:
    """Return whether flash-attention 2 is installed and built for the installed PyTorch."""
    return _imports("flash_attn")


def flash_attention_command() -> str:
    """Return the command that installs flash-attention 2 into this environment."""
    # The build needs the installed PyTorch, which an isolated build does not see.
    return f"{sys.executable} -m pip install flash-attn --no-build-isolation"


def undivided_heads(run: AstunerConfig, heads: int) -> Iterator[tuple[str, str]]:
    """Yield each key that divides a model's attention heads (0 if unknown) and does not fit, with the problem."""
    sizes = {
        "astuner.rollout.tensor_model_parallel_size": run.rollout.tensor_model_parallel_size,
        "astuner.trainer_common.ulysses_sequence_parallel_size": run.trainer_common.ulysses_sequence_parallel_size,
    }
    for key, size in sizes.items():
        if heads % size:
            fits = ", ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
            text = f"{key} is {size}, which does not divide the model's {heads} attention heads"
            yield key, f"{text}; write one of {fits}"


def attention_error(name: str, value: object, *, flash_attention: bool) -> str:
    """Return why the run cannot use an attention implementation, and a fix; "" if it can.

    Args:
        value: the implementation's name in transformers.
        flash_attention: whether flash-attention 2 can be imported.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    known = sorted({"eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()})
    # A name with a slash is a kernel on the Hugging Face Hub.
    if not isinstance(value, str) or (value not in known and "/" not in value):
        hint = did_you_mean(value, known) or f"expected one of {', '.join(known)}"
        return f"{name} is {value!r}, which transformers does not have; {hint}"
    if value not in _PACKAGES:
        return ""
    module, package = _PACKAGES[value]
    if flash_attention if module == "flash_attn" else _imports(module):
        return ""
    install = flash_attention_command() if module == "flash_attn" else f"install {package}"
    return f"{name} is {value!r}, and {module} cannot be imported; write 'sdpa', or run: {install}"


def _imports(module: str) -> bool:
    try:
        importlib.import_module(module)
    except (ImportError, OSError):  # OSError: a library that it is linked to is missing
        return False
    return True
