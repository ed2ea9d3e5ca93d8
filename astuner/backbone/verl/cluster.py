"""The Ray that a run computes on: one of its own, or one that is joined."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

from loguru import logger
from omegaconf import DictConfig, OmegaConf

from astuner.backbone.cluster.connection import ray_connected, refuse_connected
from astuner.backbone.cluster.environment import OWN_ENVIRONMENT, environment_set
from astuner.errors import BackboneError

_CPUS_PER_WORKER = 3
# TransferQueue's controller, and the router of requests.
_OTHER_CPUS = 2
_POLL_SECONDS = 1.0
_MEND = (
    "End what else computes there, give it more nodes (on a CPU, nodes are told of GPUs: `ray start --num-gpus=1`), or "
    "lower trainer_common.n_gpus_per_node or nnodes"
)

_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "VERL_LOGGING_LEVEL": "ERROR",
    "TQ_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
_CPU_ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "astuner.backbone.verl.cpu_platform",
    # verl has its engines registered for CUDA; the same code runs on a CPU.
    "VERL_ENGINE_DEVICE": "cuda",
    "TORCH_COMPILE_DISABLE": "1",
}


@contextlib.contextmanager
def environment_prepared(device: str, *, own: bool) -> Iterator[dict[str, str]]:
    """Set for the block what verl and Ray read from the environment, before they are imported.

    Gives what workers need of it.

    Args:
        device: `cpu` or `cuda`.
        own: whether the Ray is started for the run, on this machine alone.
    """
    wanted = dict(_ENVIRONMENT)
    if device == "cpu":
        wanted |= _CPU_ENVIRONMENT
    if own:
        wanted |= OWN_ENVIRONMENT
    if device == "cpu" and own:
        wanted["GLOO_SOCKET_IFNAME"] = "lo"
    with environment_set(wanted) as found:
        yield found


@contextlib.contextmanager
def ray_running(config: DictConfig, environment: Mapping[str, str]) -> Iterator[None]:
    """Start a Ray for the block, or join the one at `ray_kwargs.ray_init.address`, which is left running.

    Its own processes end with this one, however that ends.

    Args:
        config: verl's.
        environment: variables that the workers need.

    Raises:
        BackboneError: there is none at that address, or none can be started, or this process has one already.
    """
    refuse_connected()
    if environment.get("VERL_PLATFORM") == "cpu":
        # verl looks for it only when it is first imported, which may have been before.
        importlib.import_module("astuner.backbone.verl.cpu_platform")
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    settings: dict[str, Any] = OmegaConf.to_container(config.ray_kwargs.ray_init, resolve=True)  # type: ignore[assignment]
    runtime: dict[str, Any] = get_ppo_ray_runtime_env(config)
    runtime["env_vars"] = {**runtime["env_vars"], **environment, "TRANSFER_QUEUE_ENABLE": "1"}
    with ray_connected({**settings, "runtime_env": runtime}):
        yield


def refuse_small_ray(config: DictConfig, patience: float = 300.0) -> None:
    """Make sure that verl's processes have room, for which verl itself waits without end or word.

    Args:
        config: verl's.
        patience: seconds that a Ray has to free or to add what is asked of it.

    Raises:
        BackboneError: with what Ray has.
    """
    import ray

    per_node, nodes = config.trainer.n_gpus_per_node, config.trainer.nnodes
    others = _OTHER_CPUS + config.transfer_queue.backend.SimpleStorage.num_data_storage_units
    # As verl asks: a node's workers, with the processes beside each, on one machine; the others where there is room.
    workers = [{"CPU": _CPUS_PER_WORKER, "GPU": 1}] * per_node
    groups = [ray.util.placement_group(workers, strategy="STRICT_PACK") for _ in range(nodes)]
    groups.append(ray.util.placement_group([{"CPU": 1}] * others))
    began = time.monotonic()
    told = False
    try:
        while not all(group.wait(_POLL_SECONDS) for group in groups):  # Ctrl-C is heard between two waits
            lacks = (
                f"verl's processes take {others + _CPUS_PER_WORKER * per_node * nodes} CPUs and {per_node * nodes} "
                f"GPUs, {per_node} on each of {nodes} machines; of {_counted(ray.cluster_resources())} Ray has "
                f"{_counted(ray.available_resources())} left"
            )
            if time.monotonic() - began > patience:
                raise BackboneError(f"there was no room in Ray for {patience:.0f} s: {lacks}. {_MEND}")
            if not told:
                logger.warning("waiting for room in Ray, {:.0f} s at most: {}. {}", patience, lacks, _MEND)
                told = True
    finally:
        for group in groups:
            ray.util.remove_placement_group(group)


def _counted(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{resources.get(kind, 0):.0f} {kind}s" for kind in ("CPU", "GPU"))
