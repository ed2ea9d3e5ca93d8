"""The Ray instance of a verl run: its environment variables, its start or connection, and its resources."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

from loguru import logger
from omegaconf import DictConfig, OmegaConf

from astuner.backbone.ray_cluster.connection import check_not_connected, ray_connected
from astuner.backbone.ray_cluster.environment import (
    OWN_ENVIRONMENT,
    environment_replaced,
    environment_set,
    pretended_gpus,
)
from astuner.backbone.ray_cluster.worker_server import WorkerServer, worker_server
from astuner.errors import BackboneError

_CPUS_PER_WORKER = 3
_POLL_SECONDS = 1.0
_RESOURCE_ADVICE = (
    "Stop other programs on this Ray instance, add nodes (CPU nodes need a declared GPU: `ray start "
    "--num-gpus=1`), or lower trainer_common.n_gpus_per_node or nnodes"
)

_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "VERL_LOGGING_LEVEL": "ERROR",
    "TQ_LOGGING_LEVEL": "ERROR",
    # Seconds. A request to the storage on a lost node is sent three times; TransferQueue's default is 200.
    "TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT": "50",
    "VLLM_NO_USAGE_STATS": "1",
}
_CPU_ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "astuner.backbone.verl.cpu.platform",
    # verl registers its training engines for CUDA only; the same code runs on a CPU.
    "VERL_ENGINE_DEVICE": "cuda",
    "TORCH_COMPILE_DISABLE": "1",
}


@contextlib.contextmanager
def verl_environment(device: str, *, own_ray: bool) -> Iterator[dict[str, str]]:
    """Set the variables of verl and Ray for the block, before these are imported; yield those that the workers need.

    With `own_ray`, this run starts its own Ray instance, on this machine only.
    """
    variables = dict(_ENVIRONMENT)
    if device == "cpu":
        variables |= _CPU_ENVIRONMENT
    if own_ray:
        variables |= OWN_ENVIRONMENT
    if device == "cpu" and own_ray:
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    with environment_set(variables) as environment:
        yield environment


# What verl's modules and astuner's workers import, except for Ray and modules that import it.
_WORKER_MODULES = (
    "accelerate",
    "astuner.backbone.episode_workers.process",
    "astuner.llm_engine.embedded.engine",
    "datasets",
    "peft",
    "tensordict",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torchdata.stateful_dataloader",
    "transformers.models.auto.modeling_auto",
)


def verl_worker_server(environment: Mapping[str, str]) -> contextlib.AbstractContextManager[WorkerServer]:
    """Run a server during the block that forks Ray's workers with the modules of verl."""
    return worker_server(_WORKER_MODULES, environment)


@contextlib.contextmanager
def ray_running(
    config: DictConfig, environment: Mapping[str, str], server: WorkerServer | None = None
) -> Iterator[None]:
    """Start a Ray instance for the block, or connect to an existing one at `ray_kwargs.ray_init.address`.

    A Ray instance that is started here ends with this process, even if the process is killed. An existing one keeps
    running. Ray starts an interpreter for each worker unless a `server` forks them. BackboneError: there is none at
    that address, none can be started, or this process is connected to one.
    """
    check_not_connected()
    if environment.get("VERL_PLATFORM") == "cpu":
        # verl reads VERL_USE_EXTERNAL_MODULES only when it is first imported, which may have been earlier.
        importlib.import_module("astuner.backbone.verl.cpu.platform")
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    settings: dict[str, Any] = OmegaConf.to_container(config.ray_kwargs.ray_init, resolve=True)  # type: ignore[assignment]
    runtime: dict[str, Any] = get_ppo_ray_runtime_env(config)
    runtime["env_vars"] = {**runtime["env_vars"], **environment, "TRANSFER_QUEUE_ENABLE": "1"}
    if server is not None:
        runtime["py_executable"] = server.executable
    with contextlib.ExitStack() as stack:
        if "num_gpus" in settings:  # on a CPU
            stack.enter_context(environment_replaced(pretended_gpus(settings["num_gpus"])))
        stack.enter_context(ray_connected({**settings, "runtime_env": runtime}))
        yield


def check_single_run(*, own_queue: bool = False) -> None:
    """Raise BackboneError if another run has a TransferQueue on this Ray instance.

    The check must be repeated once this run has its own queue, because TransferQueue silently joins an existing
    one.
    """
    import ray

    with contextlib.suppress(ValueError):
        queue = ray.get_actor("TransferQueueController", namespace="transfer_queue")
        # An actor's id contains the job id of the driver that started it.
        if own_queue and queue._actor_id.job_id.hex() == ray.get_runtime_context().get_job_id():
            return
        raise BackboneError(
            "another run is using this Ray instance, and verl's TransferQueue serves one run at a time; wait until "
            "that run has ended, or remove trainer_common.ray_address to start a separate one for this run"
        )


def check_ray_resources(config: DictConfig, timeout: float = 300.0) -> None:
    """Wait until Ray has the resources that verl's processes need. verl itself would wait silently and forever.

    Raises:
        BackboneError: the resources are not available in time. The message lists needed and available resources.
    """
    import ray

    per_node, nodes = config.trainer.n_gpus_per_node, config.trainer.nnodes
    # The placement groups that verl requests, one per machine. Its other processes reserve no CPU.
    workers = [{"CPU": _CPUS_PER_WORKER, "GPU": 1}] * per_node
    groups = [ray.util.placement_group(workers, strategy="STRICT_PACK") for _ in range(nodes)]
    start = time.monotonic()
    warned = False
    try:
        while not all(group.wait(_POLL_SECONDS) for group in groups):  # Ctrl-C is handled between two waits
            missing = (
                f"verl's processes need {_CPUS_PER_WORKER * per_node * nodes} CPUs and {per_node * nodes} "
                f"GPUs, {per_node} on each of {nodes} machines; Ray has {_cpus_and_gpus(ray.available_resources())} "
                f"free of {_cpus_and_gpus(ray.cluster_resources())}"
            )
            if time.monotonic() - start > timeout:
                raise BackboneError(
                    f"Ray did not have the needed resources within {timeout:.0f} s: {missing}. {_RESOURCE_ADVICE}"
                )
            if not warned:
                logger.warning("waiting at most {:.0f} s for Ray: {}. {}", timeout, missing, _RESOURCE_ADVICE)
                warned = True
    finally:
        for group in groups:
            ray.util.remove_placement_group(group)


def _cpus_and_gpus(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{resources.get(kind, 0):.0f} {kind}s" for kind in ("CPU", "GPU"))
