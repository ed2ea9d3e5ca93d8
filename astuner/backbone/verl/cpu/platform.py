"""A CPU platform for verl, which has none. verl imports this module through VERL_USE_EXTERNAL_MODULES."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

from astuner.backbone.verl.cpu.vllm_cpu_alias import alias_vllm_cpu
from astuner.llm_engine.vllm_server.settings import cpu_environment

# Each of verl's processes imports this module before it looks for vLLM.
alias_vllm_cpu()


def _returning(value: object) -> Callable[..., object]:
    return lambda *args, **kwargs: value


def _device_module() -> ModuleType:
    """Return a substitute for `torch.cuda`, without device memory and with CPU streams."""
    module: Any = ModuleType("astuner_verl_cpu")
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved", "device_count"):
        setattr(module, name, _returning(0))
    for name in (
        "empty_cache",
        "ipc_collect",
        "manual_seed",
        "manual_seed_all",
        "reset_peak_memory_stats",
        "set_device",
        "set_per_process_memory_fraction",
        "synchronize",
    ):
        setattr(module, name, _returning(None))
    module.is_available = _returning(False)
    module.mem_get_info = _returning((0, 0))
    module.get_device_name = _returning("CPU")
    module.current_device = _returning(torch.device("cpu"))
    module.Stream, module.stream, module.current_stream = torch.cpu.Stream, torch.cpu.stream, torch.cpu.current_stream
    module.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    module.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    typed: ModuleType = module
    return typed


_DEVICE_MODULE = _device_module()


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """The CPU as a platform of verl, selected by VERL_PLATFORM=cpu. Ray counts one declared GPU per worker."""

    # `PlatformBase` documents the methods.
    # ruff: noqa: D102

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        return _DEVICE_MODULE

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        # verl would initialise "cpu:gloo,cpu:gloo", which PyTorch rejects. It uses an existing process group instead.
        is_worker = {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()
        if is_worker and not torch.distributed.is_initialized():
            torch.distributed.init_process_group(
                "gloo",
                rank=int(os.environ["RANK"]),
                world_size=int(os.environ["WORLD_SIZE"]),
                init_method=os.environ.get("DIST_INIT_METHOD"),
            )
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def rollout_env_vars(self) -> dict[str, str]:
        # Ray limits an engine's process to one thread unless OMP_NUM_THREADS is set.
        return {name: os.environ.get(name, value) for name, value in cpu_environment().items()}

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None
