"""A Ray cluster of several nodes on this machine, which a campaign adds and kills: `python node_cluster.py FOLDER`.

The file is run by its path, by the interpreter of the backbone's environment. Each node has its own raylet, address
(127.0.0.1, 127.0.0.2, ...) and resources. It reads one command per line from standard input and answers each with a
line of JSON:

    add CPUS GPUS    start a node; {"address": its address, "cluster": host:port of the head}
    kill ADDRESS     end all processes of the node with SIGKILL; {}
    freeze ADDRESS   stop all processes of the node with SIGSTOP, which looks like a machine without a network; {}

The first node is the head. All nodes end at the end of standard input.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil


def main(folder: str) -> None:
    """Answer commands until the end of standard input."""
    os.environ |= {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # otherwise, Ray replaces 127.0.0.1 by the machine's address
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_worker_niceness": "0",  # Ray's workers are the main work here
        "RAY_TMPDIR": folder,
        # The machine may be busy.
        "RAY_worker_register_timeout_seconds": "300",
        "RAY_gcs_rpc_server_reconnect_timeout_s": "300",
    }
    # Ray writes the cluster's address below RAY_TMPDIR, where it expects its own folder to exist.
    Path(folder, "ray").mkdir(parents=True)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the libraries also print
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    nodes: dict[str, Any] = {}
    for line in sys.stdin:
        command, *words = line.split()
        answer: dict[str, str] = {}
        if command == "add":
            address = f"127.0.0.{1 + len(nodes)}"
            head: dict[str, Any] = {} if nodes else {"gcs_server_port": 0, "temp_dir": folder}  # a free port
            nodes[address] = cluster.add_node(
                num_cpus=int(words[0]),
                num_gpus=int(words[1]),
                object_store_memory=150_000_000,
                include_dashboard=False,
                node_ip_address=address,
                **head,
            )
            answer = {"address": address, "cluster": cluster.address}
        else:
            _signal_all(nodes[words[0]], signal.SIGKILL if command == "kill" else signal.SIGSTOP)
        print(json.dumps(answer), file=answers)
    for node in nodes.values():
        _signal_all(node, signal.SIGKILL)


def _signal_all(node: Any, number: signal.Signals) -> None:
    """Send a signal to the processes of a node and to those that they have started."""
    started = [entry.process.pid for entries in node.all_processes.values() for entry in entries]
    processes: list[psutil.Process] = []
    for pid in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes += [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


if __name__ == "__main__":
    main(sys.argv[1])
