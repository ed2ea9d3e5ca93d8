"""The nodes on which Trinity's actors start: a Ray of two nodes on this machine, with actors of a class of Trinity."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from campaigns.ray_nodes import Layout, started_cluster

pytestmark = pytest.mark.trinity

PLACE_ACTORS = """
import json, sys
import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from trinity.utils.timer import Timer
from astuner.backbone.trinity.placement import set_up_gpu_worker

def node(actor):
    return ray.get(actor.__ray_call__.remote(lambda _: ray.util.get_node_ip_address()))

def start(**options):
    return ray.remote(Timer).options(**options).remote({}, "key")

def start_child(_):
    child = start(num_cpus=0)
    return ray.get(child.__ray_call__.remote(lambda _: ray.util.get_node_ip_address()))

hook = f"{set_up_gpu_worker.__module__}.{set_up_gpu_worker.__name__}"
ray.init(address=sys.argv[1], log_to_driver=False, runtime_env={"worker_process_setup_hook": hook})
set_up_gpu_worker()
group = placement_group([{"CPU": 1, "GPU": 1}])  # only the second node has a GPU
ray.get(group.ready())
engine = start(num_cpus=1, num_gpus=1, scheduling_strategy=PlacementGroupSchedulingStrategy(group))
actors = [start(num_cpus=0) for _ in range(8)]  # by default, on random nodes
runners = [start(num_cpus=1, scheduling_strategy="SPREAD") for _ in range(4)]
print(json.dumps({
    "unplaced": sorted({node(actor) for actor in actors}),
    "runners": sorted({node(actor) for actor in runners}),
    "engine": node(engine),
    "child of the engine": ray.get(engine.__ray_call__.remote(start_child)),
}))
"""


def test_actors_that_trinity_does_not_place_start_on_the_node_of_their_parent():
    with started_cluster(sys.executable, Layout((0, 1), {})) as cluster:
        environment = os.environ | {
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "PYTHONPATH": str(Path(__file__).parents[3]),
        }
        done = subprocess.run(
            [sys.executable, "-c", PLACE_ACTORS, cluster.address],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        here, other = cluster.nodes
        assert json.loads(done.stdout.splitlines()[-1]) == {
            "unplaced": [here],
            "runners": [here, other],
            "engine": other,
            "child of the engine": other,
        }
