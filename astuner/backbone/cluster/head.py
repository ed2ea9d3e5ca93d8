"""The Ray that `--with-ray` and `--with-ray-cluster` start as a service, for a run to compute on."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from astuner.backbone.cluster.environment import LEAST_CPUS, OWN_ENVIRONMENT, OWN_RAY
from astuner.config.root import AstunerConfig
from astuner.loopback import ADDRESS
from astuner.ports import free_port

CLUSTER_PORT = 6379
"""Of a head that other machines join: Ray's own, which whoever starts their part has to know."""

_OBJECT_BYTES_ON_A_CPU = 500_000_000


@dataclass(frozen=True, slots=True)
class StartedRay:
    """A Ray that the run has started as a service, and computes on.

    Attributes:
        address: `host:port` of its head, on this machine.
        others_join: whether it is open to nodes on other machines.
    """

    address: str
    others_join: bool


def is_own_ray(address: str | None, started: StartedRay | None) -> bool:
    """Whether a run's Ray is its own, and on this machine alone.

    Args:
        address: `trainer_common.ray_address`.
        started: what `--with-ray` or `--with-ray-cluster` has started.
    """
    return address is None and (started is None or not started.others_join)


@dataclass(frozen=True, slots=True)
class RayHead:
    """How to start it.

    Attributes:
        argv: the command line; it stays in the foreground, so that its process group is all of it.
        env: variables of its environment.
        ray: where it will be.
    """

    argv: list[str]
    env: Mapping[str, str]
    ray: StartedRay

    @property
    def port(self) -> int:
        """Its head's."""
        return int(self.ray.address.rpartition(":")[2])


def ray_head(config: AstunerConfig, *, others_join: bool) -> RayHead:
    """Return how to start a Ray for a run.

    Args:
        config: the run's.
        others_join: listen on the network, on ports that other machines can know; otherwise on 127.0.0.1 and on ports
            that are free, beside whatever Ray there is.
    """
    port = CLUSTER_PORT if others_join else free_port()
    argv = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}"]
    argv += ["--include-dashboard=false", "--disable-usage-stats", *_resources(config, others_join)]
    if not others_join:
        # 0 has the system choose; the other two know no such thing.
        argv += [f"--node-ip-address={ADDRESS}", "--min-worker-port=0", "--max-worker-port=0"]
        argv += [f"--dashboard-agent-listen-port={free_port()}"]
        if importlib.util.find_spec("grpc") is not None:  # Ray refuses the option without
            argv += [f"--ray-client-server-port={free_port()}"]
    env = OWN_RAY if others_join else OWN_ENVIRONMENT
    return RayHead(argv, env, StartedRay(f"{ADDRESS}:{port}", others_join))


def _resources(config: AstunerConfig, others_join: bool) -> list[str]:
    """Return the options for what Ray is told that the machine has."""
    # Not before a Ray is wanted: it brings PyTorch.
    from astuner.backbone.causal_lm import choose_device

    options = [f"--num-cpus={max(os.cpu_count() or 1, LEAST_CPUS)}"]
    if choose_device(config.trainer_common.device).type == "cuda":
        return options  # Ray counts them
    # Workers each ask for a GPU, so Ray is told of as many.
    common = config.trainer_common
    pretended = (common.n_gpus_per_node or 1) * (1 if others_join else common.nnodes)
    return [*options, f"--num-gpus={pretended}", f"--object-store-memory={_OBJECT_BYTES_ON_A_CPU}"]
