"""vLLM on a CPU: supported attention head sizes, size of the KV cache, and environment variables."""

from __future__ import annotations

from typing import Any

import psutil

from astuner.errors import ModelError

_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes of vLLM 0.28's CPU attention. With any other size, the engine starts and fails at its first request."""
_MAX_CACHE_BYTES = 4 * 2**30
_BLOCK_TOKENS = 128


def check_head_size(model_path: str, model_config: Any) -> None:
    """Check that vLLM can compute a model's attention on a CPU.

    Args:
        model_path: folder or name of the model, for the message.
        model_config: transformers' configuration of the model's text part.

    Raises:
        ModelError: the head size is not supported. The message lists the supported sizes.
    """
    size = _head_size(model_config)
    if size not in _HEAD_SIZES:
        raise ModelError(
            f"model.path {model_path!r} has attention heads of size {size}; on a CPU, vLLM supports sizes "
            f"{', '.join(map(str, _HEAD_SIZES))}. Use another model, or rollout.name: embedded"
        )


def cache_bytes(model_config: Any, length: int, sequences: int, itemsize: int) -> int:
    """Return a KV cache's size for `sequences` requests with `length` tokens each, in bytes.

    The size is at most 4 GiB, but always sufficient for a single request.

    Args:
        model_config: transformers' configuration of the model's text part.
        length: maximum number of tokens in a request.
        sequences: maximum number of concurrent requests.
        itemsize: bytes per element.
    """
    heads = getattr(model_config, "num_key_value_heads", None) or model_config.num_attention_heads
    token_bytes: int = model_config.num_hidden_layers * heads * _head_size(model_config) * 2 * itemsize
    sequence_bytes = (length // _BLOCK_TOKENS + 2) * _BLOCK_TOKENS * token_bytes
    return max(sequence_bytes * 2, min(sequence_bytes * sequences, _MAX_CACHE_BYTES))


def cpu_environment() -> dict[str, str]:
    """Return the default environment variables of vLLM on a CPU."""
    # One core is left for the agents. By default, vLLM would pin its threads to cores that other processes may use.
    cores = len(psutil.Process().cpu_affinity() or ()) if hasattr(psutil.Process, "cpu_affinity") else 2
    return {"OMP_NUM_THREADS": str(max(1, cores - 1)), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def _head_size(model_config: Any) -> int:
    return int(getattr(model_config, "head_dim", None) or model_config.hidden_size // model_config.num_attention_heads)
