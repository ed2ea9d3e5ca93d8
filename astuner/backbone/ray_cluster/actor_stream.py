"""Streams of results from Ray actors that may die."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from astuner.errors import AstunerError, BackboneError, first_line

if TYPE_CHECKING:
    from ray.exceptions import RayTaskError


class ActorLostError(Exception):
    """An actor has died, or has not answered in time."""


def actor_stream(method: Any, arguments: tuple[Any, ...], timeout: float | None) -> Iterator[Any]:
    """Call a generator method of an actor, and yield its results.

    Args:
        method: the bound method, for example `actor.run`.
        arguments: its arguments.
        timeout: maximum seconds between two results; None waits forever.

    Raises:
        ActorLostError: the actor has died, or a result did not arrive in time.
        RayTaskError: the method raised an exception.
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
