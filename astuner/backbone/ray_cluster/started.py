"""The Ray instance of a run, as backbones and the launcher see it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StartedRay:
    """A Ray instance that was started as a service of the run.

    Attributes:
        address: `host:port` of its head, on this machine.
        others_join: whether nodes on other machines may join.
    """

    address: str
    others_join: bool


def is_own_ray(address: str | None, started: StartedRay | None) -> bool:
    """Return whether a run starts its own Ray instance and uses this machine only.

    Args:
        address: `trainer_common.ray_address`.
        started: the Ray instance that `--with-ray` or `--with-ray-cluster` has started.
    """
    return address is None and (started is None or not started.others_join)
