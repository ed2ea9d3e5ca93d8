"""Starts a Ray of two nodes on this machine, for runs that connect to one: `python two_nodes.py FOLDER [VERSION]`.

Prints the address, and stops at the end of standard input. With VERSION, the nodes report that version of Ray.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

# No more CPUs than the training worker reserves.
NODE = {"num_cpus": 3, "object_store_memory": 200_000_000, "include_dashboard": False, "node_ip_address": "127.0.0.1"}


def main(folder: str, version: str = ray.__version__) -> None:
    """Start a head node with a declared GPU, and a node without one."""
    ray.__version__ = version
    # Ray writes the cluster's address below RAY_TMPDIR, where it expects its own folder to exist.
    os.environ["RAY_TMPDIR"] = folder
    Path(folder, "ray").mkdir(parents=True, exist_ok=True)
    # Port 0: the system chooses a free port.
    head = {**NODE, "num_gpus": 1, "gcs_server_port": 0, "temp_dir": folder}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(**NODE)
    print(cluster.address, flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
