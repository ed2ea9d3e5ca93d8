"""verl's vLLM replica on a CPU: its engine, with room for its cache and another way to take weights."""

from __future__ import annotations

from typing import Any

import ray
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from astuner.backbone.verl.vllm_worker import CpuWorkerExtension
from astuner.backbone.vllm_server.on_cpu import cache_bytes


class CpuVllmServer(vLLMHttpServer):
    """A vLLM engine behind the methods that verl's replicas and clients call; a Ray actor."""

    # What each of these is for stands in verl's class.

    def _get_worker_extension_cls(self) -> str:
        return f"{CpuWorkerExtension.__module__}.{CpuWorkerExtension.__name__}"

    def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
        super()._preprocess_engine_kwargs(engine_kwargs)
        shape = self.model_config.hf_config.get_text_config()
        width = 4 if self.config.dtype == "float32" else 2
        room = cache_bytes(shape, self.config.max_model_len, self.config.max_num_seqs, width)
        # Otherwise it takes a share of all memory, which a training worker and other engines are in, too.
        engine_kwargs.setdefault("kv_cache_memory_bytes", room)


class CpuVllmReplica(vLLMReplica):
    """verl's replica, of such engines."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(CpuVllmServer)
