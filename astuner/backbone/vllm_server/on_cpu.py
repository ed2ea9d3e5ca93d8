"""What vLLM needs to know and to be told on a CPU."""

from __future__ import annotations

from typing import Any

import psutil

from astuner.errors import ModelError

_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""What vLLM 0.28's attention on a CPU computes; with another size the engine starts, and its first request ends it."""
_MOST_CACHE = 4 * 2**30
_CACHE_BLOCK = 128


def refuse_unknown_heads(model_path: str, shape: Any) -> None:
    """Refuse a model whose attention vLLM cannot compute on a CPU.

    Args:
        model_path: its folder or name, for the message.
        shape: transformers' configuration of its text part.

    Raises:
        ModelError: with the sizes that there are.
    """
    size = _head_size(shape)
    if size not in _HEAD_SIZES:
        raise ModelError(
            f"model.path {model_path!r} has attention heads of size {size}; on a CPU, vLLM computes sizes "
            f"{', '.join(map(str, _HEAD_SIZES))}. Use another model, or rollout.name: embedded"
        )


def cache_bytes(shape: Any, length: int, sequences: int, width: int) -> int:
    """Bytes of key-value cache with which `sequences` requests of `length` tokens fit, at most 4 GiB.

    A single request always fits.

    Args:
        shape: transformers' configuration of the model's text part.
        length: tokens.
        sequences: requests at the same time.
        width: bytes of a number.
    """
    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    a_token: int = shape.num_hidden_layers * heads * _head_size(shape) * 2 * width
    a_sequence = (length // _CACHE_BLOCK + 2) * _CACHE_BLOCK * a_token
    return max(a_sequence * 2, min(a_sequence * sequences, _MOST_CACHE))


def cpu_environment() -> dict[str, str]:
    """Variables that vLLM needs on a CPU, where the user has not set them."""
    # A core stays for the agents; vLLM would bind its threads to cores that others may be using.
    cores = len(psutil.Process().cpu_affinity() or ()) if hasattr(psutil.Process, "cpu_affinity") else 2
    return {"OMP_NUM_THREADS": str(max(1, cores - 1)), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def _head_size(shape: Any) -> int:
    return int(getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads)
