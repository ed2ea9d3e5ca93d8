"""Errors that name the nodes that a Ray cluster has lost."""

from __future__ import annotations

from socket import AF_INET

import psutil
import pytest

from astuner.errors import BackboneError, ModelError, NoSignalError
from astuner.ray_cluster.connection import ray_connected
from astuner.ray_cluster.environment import OWN_ENVIRONMENT, environment_set
from astuner.ray_cluster.nodes import check_can_reach, lost_nodes_named, node_loss_message


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
