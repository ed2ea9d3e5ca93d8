"""The nodes of a Ray cluster: what runs on them, and errors that name those that it has lost."""

from __future__ import annotations

import os
import subprocess
import sys
from socket import AF_INET

import psutil
import pytest

from astuner.backbone.ray_cluster.connection import ray_connected
from astuner.backbone.ray_cluster.environment import OWN_ENVIRONMENT, environment_set
from astuner.backbone.ray_cluster.nodes import check_can_reach, lost_nodes_named, node_loss_message
from astuner.errors import BackboneError, ModelError, NoSignalError
from campaigns.ray_nodes import Layout, started_cluster


def test_the_message_names_the_nodes_and_keeps_the_failure():
    message = node_loss_message(["10.0.0.3"], 1, "an engine failed: it died. Run the same command again")
    assert message == (
        "the Ray cluster has lost node 10.0.0.3 during the run; 1 node is left, so add another if its resources are "
        "needed. An engine failed: it died. Run the same command again"
    )
    assert "has lost nodes 10.0.0.3, 10.0.0.4 during the run; 2 nodes are left" in node_loss_message(
        ["10.0.0.3", "10.0.0.4"], 2, "ActorDiedError: it died. Run the same command again"
    )


def test_a_server_on_the_loopback_address_is_for_nodes_of_this_machine():
    here = [entry.address for entries in psutil.net_if_addrs().values() for entry in entries if entry.family == AF_INET]
    check_can_reach("the server", ["127.0.0.1", "127.0.0.2", *here], "use one machine")
    expected = r"^the server listens on 127.0.0.1 .* other machines \(192.0.2.7\), .*; use one machine$"
    with pytest.raises(BackboneError, match=expected):
        check_can_reach("the server", ["127.0.0.1", "192.0.2.7"], "use one machine")


@pytest.mark.verl
def test_an_error_without_a_lost_node_stays_as_it_is():
    errors = BackboneError("a worker failed"), ModelError("an engine failed"), NoSignalError("nothing to learn")
    with environment_set(OWN_ENVIRONMENT), ray_connected({"num_cpus": 1}):
        for error in errors:
            with pytest.raises(type(error)) as raised, lost_nodes_named("Run the same command again"):
                raise error
            assert raised.value is error


PRINT_PLACES = """
import sys, ray
from astuner.backbone.ray_cluster.nodes import on_this_node, override_actor_options

class Kept:
    def node(self):
        return ray.util.get_node_ip_address()

ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
undo = override_actor_options(lambda module, strategy: on_this_node() if strategy is None else {})
for options in ({}, {"scheduling_strategy": "SPREAD"}):
    actors = [ray.remote(Kept).options(**options).remote() for _ in range(6)]
    print(*sorted(set(ray.get([actor.node.remote() for actor in actors]))))
original = ray.actor.ActorClass._remote
undo()
print(ray.actor.ActorClass._remote is original)
"""


@pytest.mark.verl
def test_actors_are_kept_on_the_node_that_starts_them():
    with started_cluster(sys.executable, Layout((0, 0), {})) as cluster:
        # In a new process: ray reads its environment when it is imported.
        done = subprocess.run(
            [sys.executable, "-c", PRINT_PLACES, cluster.address],
            env=os.environ | {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"},
            capture_output=True, text=True, timeout=300, check=True,
        )  # fmt: skip
    assert done.stdout.splitlines() == ["127.0.0.1", "127.0.0.1 127.0.0.2", "False"]
