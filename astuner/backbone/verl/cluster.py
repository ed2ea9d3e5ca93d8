"""The Ray that a run computes on: one of its own, or one that is joined."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import ray
from omegaconf import DictConfig, OmegaConf

from astuner.errors import BackboneError
from astuner.model_tuner import first_line

_PREFIX = "astuner-ray-"

_CPU_ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "astuner.backbone.verl.cpu_platform",
    # verl has its engines registered for CUDA; the same code runs on a CPU.
    "VERL_ENGINE_DEVICE": "cuda",
    "TORCH_COMPILE_DISABLE": "1",
}
_OWN_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray would kill workers where the machine is nearly full of other things; the system does so when it is full.
    "RAY_memory_monitor_refresh_ms": "0",
    # Ray's default leaves its workers what other processes do not want of a core: they are the run itself.
    "RAY_worker_niceness": "0",
}


def prepare_environment(device: str, *, own: bool) -> dict[str, str]:
    """Set what verl and Ray read from the environment, before they are imported; return what workers need of it.

    Args:
        device: `cpu` or `cuda`.
        own: whether the Ray is started for the run.
    """
    wanted = {"TOKENIZERS_PARALLELISM": "false", "VERL_LOGGING_LEVEL": "ERROR", "TQ_LOGGING_LEVEL": "ERROR"}
    if device == "cpu":
        wanted |= _CPU_ENVIRONMENT
    if own:
        wanted |= _OWN_ENVIRONMENT
    if device == "cpu" and own:
        wanted["GLOO_SOCKET_IFNAME"] = "lo"
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
    return {name: os.environ[name] for name in wanted}


@contextlib.contextmanager
def ray_running(config: DictConfig, environment: Mapping[str, str]) -> Iterator[None]:
    """Start a Ray for the block, or join the one at `ray_kwargs.ray_init.address`, which is left running.

    Its own processes end with this one, however that ends.

    Args:
        config: verl's.
        environment: variables that the workers need.

    Raises:
        BackboneError: there is none at that address, or none can be started.
    """
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    settings: dict[str, Any] = OmegaConf.to_container(config.ray_kwargs.ray_init, resolve=True)  # type: ignore[assignment]
    runtime: dict[str, Any] = get_ppo_ray_runtime_env(config)
    runtime["env_vars"] = {**runtime["env_vars"], **environment, "TRANSFER_QUEUE_ENABLE": "1"}
    settings = {"log_to_driver": False, "logging_level": "ERROR", **settings, "runtime_env": runtime}
    with contextlib.ExitStack() as stack:
        if settings.get("address") is None:
            folder = stack.enter_context(_temporary_folder())
            settings = {"include_dashboard": False, **settings, "address": "local", "_temp_dir": folder}
        stack.callback(ray.shutdown)
        try:
            ray.init(**settings)
        # Ray raises errors of many kinds here.
        except Exception as error:
            raise BackboneError(_no_ray(settings["address"], error)) from error
        yield


def _no_ray(address: str, error: Exception) -> str:
    if address == "local":
        return f"Ray could not be started: {first_line(error)}"
    return (
        f"the Ray at {address} (trainer_common.ray_address) could not be joined: {first_line(error)}; start one there "
        "with `ray start --head`, or leave the key out to have one started for the run"
    )


@contextlib.contextmanager
def _temporary_folder() -> Iterator[str]:
    """Give a folder with a short path: Ray's sockets lie deep in it, and a socket's path has at most 107 characters."""
    parent = Path(tempfile.gettempdir())
    _remove_left_behind(parent)
    folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_left_behind(parent: Path) -> None:
    """Remove the folders of runs that were killed."""
    for folder in parent.glob(f"{_PREFIX}*"):
        owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdecimal() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)
