"""Runs vLLM and verl's workers under Trinity on a CPU, for tests only; enabled through PYTHONPATH.

Python imports this module at startup, in all processes of a run. Each module below is patched after its import. The
patches replace the GPU by the CPU. They change nothing else, except that vLLM does not load new weights through NCCL.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

GPUS = 2
"""GPUs that the launcher detects, one for the engine and one for the trainer. Ray reads RAY_OVERRIDE_RESOURCES."""

_patches: dict[str, Callable[[Any], None]] = {}


def _after_import_of(name: str) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    def register(patch: Callable[[Any], None]) -> Callable[[Any], None]:
        _patches[name] = patch
        return patch

    return register


class _Finder(importlib.abc.MetaPathFinder):
    """Wraps the loaders of the modules to patch."""

    def __init__(self) -> None:
        self._in_progress: set[str] = set()

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname not in _patches or fullname in self._in_progress:
            return None
        self._in_progress.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._in_progress.discard(fullname)
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
        _patches[module.__name__](module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


@_after_import_of("torch.cuda")
def _gpu_count(module: Any) -> None:
    if "astuner" in sys.orig_argv:
        module.device_count = lambda: GPUS


@_after_import_of("verl.utils.device")
def _device(module: Any) -> None:
    import torch

    class Cpu:
        """Replaces `torch.cuda`: no device memory, nothing to synchronize."""

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


@_after_import_of("verl.workers.engine.base")
def _engines(module: Any) -> None:
    def registered(cls: Any, model_type: str, backend: str) -> Any:
        return cls._engines[model_type][backend]["cuda"]

    module.EngineRegistry.get_engine_cls = classmethod(registered)


@_after_import_of("trinity.common.models.vllm_model")
def _vllm(module: Any) -> None:
    """Use vLLM's CPU worker, and load weights from the source of NCCL's first rank."""
    rollout_model = module.vLLMRolloutModel
    prepare = rollout_model.prepare

    async def patched_prepare(self: Any) -> None:
        import vllm

        stock = vllm.AsyncEngineArgs

        def patched_args(**kwargs: Any) -> Any:
            for name in ("weight_transfer_config", "gpu_memory_utilization", "async_scheduling"):
                kwargs.pop(name, None)
            kwargs |= {"worker_cls": "vllm_cpu_worker.CpuWorker", "distributed_executor_backend": "uni"}
            return stock(**kwargs)

        vllm.AsyncEngineArgs = patched_args
        try:
            await prepare(self)
        finally:
            vllm.AsyncEngineArgs = stock

    async def patched_init_process_group(self: Any, **_: Any) -> None:
        """Do nothing: there is no process group."""

    async def patched_sync(self: Any, model_version: int, method: Any, timeout: float = 0.0) -> int:
        await self.async_llm.pause_generation(mode="keep", clear_cache=False)
        await self.async_llm.reset_prefix_cache(reset_running_requests=True)
        folder = f"{self.config.checkpoint_job_dir}/global_step_{model_version}/actor"
        await self._collective_rpc("load_new_weights", args=(method.value, folder, self.ray_namespace))
        await self.async_llm.resume_generation()
        self.model_version = model_version
        return model_version

    rollout_model.prepare = patched_prepare
    rollout_model.init_process_group = patched_init_process_group
    rollout_model.sync_model_weights = patched_sync


@_after_import_of("vllm.entrypoints.openai.api_server")
def _server_socket(module: Any) -> None:
    # Trinity supports vLLM up to 0.23, in which this argument has a default; there is no CPU build of that version.
    stock = module.create_server_socket
    module.create_server_socket = lambda address, reuse_port=False: stock(address, reuse_port=reuse_port)


sys.meta_path.insert(0, _Finder())
