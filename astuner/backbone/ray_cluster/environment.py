"""Environment variables for Ray and its processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

OWN_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray kills workers if the machine's memory is nearly full, even if other programs use it. The OS still kills
    # processes if the memory is full.
    "RAY_memory_monitor_refresh_ms": "0",
    # By default, Ray runs its workers at a low priority; here they are the main work.
    "RAY_worker_niceness": "0",
    # Without this, Ray starts workers before it knows the driver's environment, and then starts others.
    "RAY_prestart_worker_first_driver": "0",
}

ON_LOOPBACK = {
    # Read when ray is imported. Without it, Ray replaces 127.0.0.1 by the network address and listens on all
    # interfaces.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}

OWN_ENVIRONMENT: Mapping[str, str] = OWN_RAY | ON_LOOPBACK
"""Variables for a Ray instance that a run starts on this machine, and for the processes that use it."""

TOKEN_MODE = "RAY_AUTH_MODE"
"""Whether Ray's processes authenticate with a token. Ray sets it when it starts, and does not unset it."""

LEAST_CPUS = 64
"""Minimum CPU count to declare. Ray only counts CPUs; actors that request more than declared would wait forever."""


@contextlib.contextmanager
def environment_set(variables: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Set variables during the block, except those that the user has set; yield the values of all variables."""
    added = variables.keys() - os.environ.keys()
    temporary = added if TOKEN_MODE in os.environ else added | {TOKEN_MODE}
    os.environ.update({name: variables[name] for name in added})
    try:
        yield {name: os.environ[name] for name in variables}
    finally:
        for name in temporary:
            os.environ.pop(name, None)


def on_loopback() -> contextlib.AbstractContextManager[dict[str, str]]:
    """Make Ray listen on this machine only if it is imported during the block."""
    return environment_set(ON_LOOPBACK)


def pretended_gpus(count: int) -> dict[str, str]:
    """Return the variables with which Ray starts `count` GPUs that the machine does not have.

    Ray starts no more GPUs than `CUDA_VISIBLE_DEVICES` shows, if the user has set it.
    """
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(count)))}


@contextlib.contextmanager
def environment_replaced(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables during the block, including those that the user has set, and restore them afterwards."""
    earlier = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in earlier.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def export_ray_address() -> None:
    """Export this Ray worker's cluster address to the processes it starts.

    vLLM's engine process receives weights through Ray; without the address it would start its own Ray instance.
    """
    import ray

    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
