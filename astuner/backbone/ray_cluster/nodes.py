"""The Ray cluster's nodes that a run has joined: their addresses, actors and results, and lost nodes' errors."""

from __future__ import annotations

import contextlib
import ipaddress
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import psutil

from astuner.errors import AstunerError, BackboneError, ModelError, RecordError, first_line
from astuner.system.localhost import ADDRESS

if TYPE_CHECKING:
    from ray.exceptions import RayTaskError

# Ray reports a process as unavailable at once, and its node as dead after five failed health checks, one every 3 s.
_DETECTION_SECONDS = 30.0
_POLL_SECONDS = 0.5
_FAILURES = (BackboneError, ModelError, RecordError)


@contextlib.contextmanager
def lost_nodes_named(advice: str) -> Iterator[None]:
    """Name the nodes that the Ray cluster has lost since the block's start in the error that ends it, a BackboneError.

    `advice` says how to continue, as a sentence without a period; it is added to errors that are not astuner's.
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
    until = time.monotonic() + _DETECTION_SECONDS
    while True:
        living = living_nodes()
        lost = [address for node, address in nodes.items() if node not in living]
        # With one node, this process would have been lost with it.
        if lost or len(nodes) == 1 or time.monotonic() > until:
            return lost, len(living)
        time.sleep(_POLL_SECONDS)


def node_loss_message(lost: list[str], left: int, failure: str) -> str:
    """Return the message for a run that ended after losing nodes; `failure` says how to continue."""
    noun = "node" if len(lost) == 1 else "nodes"
    are = "node is" if left == 1 else "nodes are"
    return (
        f"the Ray cluster has lost {noun} {', '.join(lost)} during the run; {left} {are} left, so add another if its "
        f"resources are needed. {failure[:1].upper()}{failure[1:]}"
    )


def override_actor_options(overrides: Callable[[str, Any], dict[str, Any]]) -> Callable[[], None]:
    """Start actors with other options from now on, and return a function that undoes this.

    Libraries have no setting for the nodes and the resources of their actors. `overrides` returns Ray options that
    replace an actor's own, from its class's module and its scheduling strategy, which is None by default.
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
    """Raise BackboneError if a node is on another machine: `server` listens on this machine's loopback address only."""
    here = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    others = [node for node in addresses if node not in here and not ipaddress.ip_address(node).is_loopback]
    if others:
        raise BackboneError(
            f"{server} listens on {ADDRESS} of this machine, but the Ray cluster also has nodes on other machines "
            f"({', '.join(others)}), whose processes cannot reach it; {fix}"
        )


class ActorLostError(Exception):
    """An actor has died, or has not answered in time."""


def actor_stream(method: Any, arguments: tuple[Any, ...], timeout: float | None) -> Iterator[Any]:
    """Call a generator method of an actor, and yield its results, each within `timeout` seconds; None waits forever.

    ActorLostError: the actor has died, or a result did not arrive in time. RayTaskError: the method raised an
    exception.
    """
    import ray
    from ray.exceptions import RayError, RayTaskError

    try:
        stream = method.options(num_returns="streaming").remote(*arguments)
        while True:
            ready, _ = ray.wait([stream], timeout=timeout)
            if not ready:
                raise ActorLostError(f"no episode finished within {timeout:.0f} s")
            try:
                reference = next(stream)
            except StopIteration:
                return
            yield ray.get(reference)
    except RayTaskError:
        raise
    # A RayError of any kind: when a node fails, Ray loses the actor, its objects, or their owner.
    except RayError as error:
        raise ActorLostError(first_line(error)) from error


def to_astuner_error(error: RayTaskError, message: str) -> AstunerError:
    """Return the exception of a remote task as an astuner error, chained to the remote traceback."""
    cause = error.cause
    if isinstance(cause, AstunerError):
        converted = type(cause)(str(cause))
    else:
        converted = BackboneError(f"{message}: {type(cause).__name__}: {cause}")
    converted.__cause__ = error
    return converted
