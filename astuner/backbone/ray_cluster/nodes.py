"""The nodes of the Ray cluster that a run has joined: their addresses, what runs on them, and errors of lost nodes."""

from __future__ import annotations

import contextlib
import ipaddress
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import psutil

from astuner.errors import AstunerError, BackboneError, ModelError, RecordError, first_line
from astuner.system.localhost import ADDRESS

# Ray reports a process as unavailable at once, and its node as dead after five failed health checks, one every 3 s.
_DETECTION_SECONDS = 30.0
_POLL_SECONDS = 0.5
_FAILURES = (BackboneError, ModelError, RecordError)


@contextlib.contextmanager
def lost_nodes_named(advice: str) -> Iterator[None]:
    """Name the nodes that the connected Ray cluster has lost in an error that ends the block.

    Args:
        advice: how to continue, as a sentence without a period. Added to errors that are not astuner's.

    Raises:
        BackboneError: a process failed, and the cluster has lost a node since the start of the block.
    """
    from ray.exceptions import RayTaskError

    nodes = living_nodes()
    try:
        yield
    # Libraries raise errors of many types after the loss of a process: TransferQueue raises RuntimeError.
    except Exception as error:
        # Subclasses, such as NoSignalError, have causes of their own.
        if isinstance(error, AstunerError) and type(error) not in _FAILURES:
            raise
        lost, left = _lost_nodes(nodes)
        if not lost:
            raise
        failure = str(error)
        if not isinstance(error, AstunerError):
            failure = f"{first_line(error.cause if isinstance(error, RayTaskError) else error)}. {advice}"
        raise BackboneError(node_loss_message(lost, left, failure)) from error


def living_nodes() -> dict[str, str]:
    """Return the addresses of the connected cluster's living nodes by their ids."""
    import ray

    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def _lost_nodes(nodes: Mapping[str, str]) -> tuple[list[str], int]:
    """Return the lost nodes' addresses among `nodes`, and the number of living nodes in the cluster."""
    until = time.monotonic() + _DETECTION_SECONDS
    while True:
        living = living_nodes()
        lost = [address for node, address in nodes.items() if node not in living]
        # With one node, this process would have been lost with it.
        if lost or len(nodes) == 1 or time.monotonic() > until:
            return lost, len(living)
        time.sleep(_POLL_SECONDS)


def node_loss_message(lost: list[str], left: int, failure: str) -> str:
    """Return the message for a run that ended after losing nodes.

    Args:
        lost: addresses of the lost nodes.
        left: number of nodes that are left.
        failure: the failure, with advice on how to continue.
    """
    noun = "node" if len(lost) == 1 else "nodes"
    are = "node is" if left == 1 else "nodes are"
    return (
        f"the Ray cluster has lost {noun} {', '.join(lost)} during the run; {left} {are} left, so add another if its "
        f"resources are needed. {failure[:1].upper()}{failure[1:]}"
    )


def override_actor_options(overrides: Callable[[str, Any], dict[str, Any]]) -> Callable[[], None]:
    """Start actors with other options from now on, and return a function that undoes this.

    Libraries have no setting for the nodes and the resources of their actors.

    Args:
        overrides: returns Ray options that replace an actor's own, from its class's module and its scheduling strategy,
            which is None by default.
    """
    from ray.actor import ActorClass

    original = ActorClass._remote

    def start(self: Any, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        module = self.__ray_metadata__.modified_class.__module__
        return original(self, args, kwargs, **options | overrides(module, options.get("scheduling_strategy")))

    ActorClass._remote = start
    return lambda: setattr(ActorClass, "_remote", original)


def on_this_node() -> dict[str, Any]:
    """Return the options for an actor that runs on this process's node and reserves none of its CPUs.

    By default, Ray starts an actor that reserves nothing on a random node, and the loss of that node would end the run.
    An actor that reserves a CPU could not start on a node without a free CPU.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=False), "num_cpus": 0}


def check_can_reach(server: str, addresses: Iterable[str], fix: str) -> None:
    """Check that all nodes of a cluster can reach a server that listens on this machine's loopback address only.

    Args:
        server: the name of the server.
        addresses: IP addresses of the nodes.
        fix: how to run without the other nodes.

    Raises:
        BackboneError: a node is on another machine.
    """
    here = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    others = [node for node in addresses if node not in here and not ipaddress.ip_address(node).is_loopback]
    if others:
        raise BackboneError(
            f"{server} listens on {ADDRESS} of this machine, but the Ray cluster also has nodes on other machines "
            f"({', '.join(others)}), whose processes cannot reach it; {fix}"
        )
