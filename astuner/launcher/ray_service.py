"""The service of `--with-ray` and `--with-ray-cluster`."""

from __future__ import annotations

import importlib.util
import os
import sys

from astuner.backbone.base import StartedRay
from astuner.backbone.ray_cluster.environment import (
    CLUSTER_PORT,
    LEAST_CPUS,
    OWN_ENVIRONMENT,
    OWN_RAY,
    pretended_gpus,
    short_parent,
)
from astuner.config.root import AstunerConfig
from astuner.config.services import HealthConfig, ServiceConfig
from astuner.launcher.built_in_services import BuiltInService
from astuner.processes.guarded_process import TempDir
from astuner.system.localhost import ADDRESS, free_port

# What `ray start` prints when the node has registered. The head's port is open before, when no run can connect yet.
_READY_TEXT = "Ray runtime started"
_CPU_OBJECT_STORE_BYTES = 500_000_000


def ray_service(config: AstunerConfig, *, others_join: bool) -> BuiltInService:
    """Return the Ray head of a run. It runs in the foreground, so that all its processes are in one group.

    Args:
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
    env = dict(OWN_RAY if others_join else OWN_ENVIRONMENT)
    # Imported late: it imports PyTorch.
    from astuner.llm_engine.causal_lm import choose_device

    if choose_device(config.trainer_common.device).type != "cuda":  # otherwise, Ray detects the GPUs
        # Every worker requests a GPU, so that a CPU machine declares as many as there are workers.
        common = config.trainer_common
        gpus = (common.n_gpus_per_node or 1) * (1 if others_join else common.nnodes)
        argv += [f"--num-gpus={gpus}", f"--object-store-memory={_CPU_OBJECT_STORE_BYTES}"]
        env |= pretended_gpus(gpus)
    service = ServiceConfig(command=argv, env=env, health=HealthConfig(port=port))
    temp_dir = TempDir(str(short_parent()), ("TMPDIR", "RAY_TMPDIR"))
    ray = StartedRay(f"{ADDRESS}:{port}", others_join)
    return BuiltInService(service, "ray", '`pip install "ray[default]"`', temp_dir, ray, _READY_TEXT)
