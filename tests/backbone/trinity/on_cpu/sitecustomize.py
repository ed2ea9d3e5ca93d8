"""Lets vLLM and verl's workers under Trinity run where there is no GPU; for tests alone, by PYTHONPATH.

Python imports this module when it starts, in all of a run's processes. Each module below is changed when it has been
imported, and stays as it is in a process that never imports it. What is changed has a CPU in the place of the GPU that
it asks for; what it does with it is left alone, but for the way in which vLLM takes new weights, which is NCCL's.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

GPUS = 2
"""That the launcher is to see: one for the engine, one for the trainer. Ray is told by RAY_OVERRIDE_RESOURCES."""

_changes: dict[str, Callable[[Any], None]] = {}


def _after_import_of(name: str) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    def keep(change: Callable[[Any], None]) -> Callable[[Any], None]:
        _changes[name] = change
        return change

    return keep


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules to change as all others are found, and has them changed once they are loaded."""

    def __init__(self) -> None:
        self._looking: set[str] = set()

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname not in _changes or fullname in self._looking:
            return None
        self._looking.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking.discard(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _changes[module.__name__](module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


@_after_import_of("torch.cuda")
def _seen_gpus(module: Any) -> None:
    if "astuner" in sys.orig_argv:
        module.device_count = lambda: GPUS


@_after_import_of("verl.utils.device")
def _device(module: Any) -> None:
    import torch

    class Cpu:
        """In the place of `torch.cuda`: no device memory, nothing to wait for."""

        def current_device(self) -> torch.device:
            return torch.device("cpu")

        def get_device_name(self, *_: Any) -> str:
            return "CPU"

        def mem_get_info(self, *_: Any) -> tuple[int, int]:
            return 0, 1

        def get_rng_state(self, *_: Any) -> torch.Tensor:
            return torch.get_rng_state()

        def set_rng_state(self, state: torch.Tensor, *_: Any) -> None:
            torch.set_rng_state(state)

        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: 0

    cpu = Cpu()
    module.get_torch_device = lambda: cpu
    module.get_device_id = lambda: torch.device("cpu")
    module.get_nccl_backend = lambda: "gloo"
    torch.cuda.get_device_capability = lambda *_: (8, 0)


@_after_import_of("verl.utils.distributed")
def _process_group(module: Any) -> None:
    stock = module.initialize_global_process_group_ray
    module.initialize_global_process_group_ray = lambda timeout_second=None, backend=None: stock(timeout_second, "gloo")


@_after_import_of("verl.utils.attention_utils")
def _packing(module: Any) -> None:
    def functions() -> tuple[Any, ...]:
        from einops import rearrange
        from verl.utils import npu_flash_attn_utils as plain

        return plain.index_first_axis, plain.pad_input, rearrange, plain.unpad_input

    module._get_attention_functions = functions


@_after_import_of("verl.workers.engine.base")
def _engines(module: Any) -> None:
    def registered(cls: Any, model_type: str, backend: str) -> Any:
        return cls._engines[model_type][backend]["cuda"]

    module.EngineRegistry.get_engine_cls = classmethod(registered)


@_after_import_of("trinity.common.models.vllm_model")
def _vllm(module: Any) -> None:
    """Have vLLM's worker for a CPU, and have it take weights from where NCCL's first rank would."""
    rollout_model = module.vLLMRolloutModel
    prepare = rollout_model.prepare

    async def prepared(self: Any) -> None:
        import vllm

        stock = vllm.AsyncEngineArgs

        def arguments(**given: Any) -> Any:
            for name in ("weight_transfer_config", "gpu_memory_utilization", "async_scheduling"):
                given.pop(name, None)
            given |= {"worker_cls": "vllm_cpu_worker.CpuWorker", "distributed_executor_backend": "uni"}
            return stock(**given)

        vllm.AsyncEngineArgs = arguments
        try:
            await prepare(self)
        finally:
            vllm.AsyncEngineArgs = stock

    async def joined(self: Any, **_: Any) -> None:
        """Do nothing: there is no group."""

    async def taken(self: Any, model_version: int, method: Any, timeout: float = 0.0) -> int:
        await self.async_llm.pause_generation(mode="keep", clear_cache=False)
        await self.async_llm.reset_prefix_cache(reset_running_requests=True)
        place = f"{self.config.checkpoint_job_dir}/global_step_{model_version}/actor"
        await self._collective_rpc("take_weights", args=(method.value, place, self.ray_namespace))
        await self.async_llm.resume_generation()
        self.model_version = model_version
        return model_version

    rollout_model.prepare, rollout_model.init_process_group = prepared, joined
    rollout_model.sync_model_weights = taken


@_after_import_of("vllm.entrypoints.openai.api_server")
def _server_socket(module: Any) -> None:
    # Trinity knows vLLM up to 0.23, whose function has a default here; there is no such build for CPUs.
    stock = module.create_server_socket
    module.create_server_socket = lambda address, reuse_port=False: stock(address, reuse_port=reuse_port)


sys.meta_path.insert(0, _Finder())
