"""verl's vLLM replica on a CPU, with a bounded KV cache and a CPU-specific weight update."""

from __future__ import annotations

from typing import Any

import ray
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from astuner.backbone.verl.cpu.vllm_worker import CpuWorkerExtension
from astuner.llm_engine.vllm_server.settings import cache_bytes


class CpuVllmServer(vLLMHttpServer):
    """verl's vLLM server, a Ray actor, with settings for a CPU."""

    def _get_worker_extension_cls(self) -> str:
        return f"{CpuWorkerExtension.__module__}.{CpuWorkerExtension.__name__}"

    def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
        super()._preprocess_engine_kwargs(engine_kwargs)
        model_config = self.model_config.hf_config.get_text_config()
        itemsize = 4 if self.config.dtype == "float32" else 2
        num_bytes = cache_bytes(model_config, self.config.max_model_len, self.config.max_num_seqs, itemsize)
        # vLLM's default is a share of all memory, which training workers and other engines also need.
        engine_kwargs.setdefault("kv_cache_memory_bytes", num_bytes)


class CpuVllmReplica(vLLMReplica):
    """verl's vLLM replica with `CpuVllmServer` as its server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(CpuVllmServer)
