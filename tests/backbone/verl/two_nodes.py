"""A Ray of two nodes on this machine, for runs that join one: `python two_nodes.py FOLDER [VERSION]`.

Prints its address, and ends with its standard input. With VERSION, that is the version of Ray that it says it has.
"""

from __future__ import annotations

import sys

import ray
from ray.cluster_utils import Cluster

NODE = {"num_cpus": 4, "object_store_memory": 200_000_000, "include_dashboard": False, "node_ip_address": "127.0.0.1"}


def main(folder: str, version: str = ray.__version__) -> None:
    """Start a head with a pretended GPU, and a node without one."""
    ray.__version__ = version
    # Port 0 of the head: the system chooses.
    head = {**NODE, "num_gpus": 1, "gcs_server_port": 0, "temp_dir": folder}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(**NODE)
    print(cluster.address, flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
