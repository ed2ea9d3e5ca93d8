"""The Ray head that `--with-ray` and `--with-ray-cluster` start as a service of the run."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from astuner.backbone.ray_cluster.environment import LEAST_CPUS, OWN_ENVIRONMENT, OWN_RAY, pretended_gpus
from astuner.backbone.ray_cluster.started import StartedRay
from astuner.config.root import AstunerConfig
from astuner.system.localhost import ADDRESS, free_port

CLUSTER_PORT = 6379
"""Port of a head that other machines join: Ray's default port."""

READY_TEXT = "Ray runtime started"
"""What `ray start` prints when the node has registered. The head's port is open before, when no run can connect yet."""

_CPU_OBJECT_STORE_BYTES = 500_000_000


@dataclass(frozen=True, slots=True)
class RayHead:
    """The command that starts a Ray head.

    Attributes:
        argv: the command line; it runs in the foreground, so that all its processes are in one group.
        env: environment variables.
        ray: the Ray instance that it starts.
    """

    argv: list[str]
    env: Mapping[str, str]
    ray: StartedRay

    @property
    def port(self) -> int:
        """The head's port."""
        return int(self.ray.address.rpartition(":")[2])


def ray_head(config: AstunerConfig, *, others_join: bool) -> RayHead:
    """Return the command that starts a Ray head for a run.

    Args:
        config: the run's configuration.
        others_join: listen on the network, on known ports, so that other machines can join; otherwise on 127.0.0.1 and
            on free ports, so that several Ray instances can run concurrently.
    """
    port = CLUSTER_PORT if others_join else free_port()
    argv = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}"]
    argv += ["--include-dashboard=false", "--disable-usage-stats", f"--num-cpus={max(os.cpu_count() or 1, LEAST_CPUS)}"]
    if not others_join:
        # 0 lets the OS choose a port; the other two options do not support it.
        argv += [f"--node-ip-address={ADDRESS}", "--min-worker-port=0", "--max-worker-port=0"]
        argv += [f"--dashboard-agent-listen-port={free_port()}"]
        if importlib.util.find_spec("grpc") is not None:  # without grpc, Ray rejects the option
            argv += [f"--ray-client-server-port={free_port()}"]
    env = OWN_RAY if others_join else OWN_ENVIRONMENT
    # Imported late: it imports PyTorch.
    from astuner.llm_engine.causal_lm import choose_device

    if choose_device(config.trainer_common.device).type != "cuda":  # otherwise, Ray detects the GPUs
        # Every worker requests a GPU, so that a CPU machine declares as many as there are workers.
        common = config.trainer_common
        gpus = (common.n_gpus_per_node or 1) * (1 if others_join else common.nnodes)
        argv += [f"--num-gpus={gpus}", f"--object-store-memory={_CPU_OBJECT_STORE_BYTES}"]
        env = {**env, **pretended_gpus(gpus)}
    return RayHead(argv, env, StartedRay(f"{ADDRESS}:{port}", others_join))
