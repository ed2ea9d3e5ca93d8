"""A CPU as one of verl's platforms, which verl itself does not have; loaded by VERL_USE_EXTERNAL_MODULES."""

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

from astuner.backbone.verl.vllm_name import answer_for_vllm
from astuner.backbone.vllm_server.on_cpu import cpu_environment

# Here, as every process of verl's loads this module before it looks for vLLM.
answer_for_vllm()


def _returning(value: object) -> Callable[..., object]:
    return lambda *args, **kwargs: value


def _device_module() -> ModuleType:
    """Return what verl calls in the place of `torch.cuda`: there is no device memory, and the only stream is ours."""
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
    found: ModuleType = module
    return found


_DEVICE_MODULE = _device_module()


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """Chosen by VERL_PLATFORM=cpu alone; a worker's GPU is a number that Ray is told."""

    # What each of these is for stands in `PlatformBase`.
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
        # verl would ask for "cpu:gloo,cpu:gloo", which PyTorch refuses; it takes a process group that is there already.
        named = {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()
        if named and not torch.distributed.is_initialized():
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
        # Ray gives an engine's process one thread, where the user has not said otherwise.
        return {name: os.environ.get(name, value) for name, value in cpu_environment().items()}

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None
