"""The Ray that a run computes on, whatever trains there: one of its own, or one that is joined."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import psutil

from astuner.backbone.cluster.environment import LEAST_CPUS
from astuner.backbone.cluster.folder import MEND, ray_folder
from astuner.backbone.cluster.joining import found_ray, not_joined
from astuner.errors import BackboneError
from astuner.loopback import ADDRESS
from astuner.model_tuner import first_line

_STARTS = 3
_SECONDS_TO_END = 10.0


def refuse_connected() -> None:
    """Make sure that this process has no Ray.

    Raises:
        BackboneError: it has one.
    """
    import ray

    if ray.is_initialized():
        raise BackboneError(
            "this process is connected to a Ray already, which is left as it is; call ray.shutdown() before, or run "
            "astuner in a process of its own, with trainer_common.ray_address to join that Ray"
        )


@contextlib.contextmanager
def ray_connected(settings: Mapping[str, Any]) -> Iterator[None]:
    """Start a Ray for the block, or join the one at `address`, which is left running.

    Its own processes end with this one, however that ends.

    Args:
        settings: of `ray.init`.

    Raises:
        BackboneError: there is none at that address, or none can be started.
    """
    import ray

    settings = {"log_to_driver": False, "logging_level": "ERROR", **settings}
    with contextlib.ExitStack() as stack:
        if settings.get("address") is None:
            folder = stack.enter_context(ray_folder())
            settings = {"include_dashboard": False, "_node_ip_address": ADDRESS, **settings, "address": "local"}
            settings["_temp_dir"] = folder
            # Ray only counts with them: a trainer's processes would wait for ever on a machine with few.
            settings["num_cpus"] = settings.get("num_cpus") or max(os.cpu_count() or 1, LEAST_CPUS)
        else:
            settings["address"] = found_ray(settings["address"])
        stack.callback(ray.shutdown)  # none but this one, even half started
        _init(settings)
        yield


def _init(settings: Mapping[str, Any]) -> None:
    """Start Ray or join it; where the machine was too busy for Ray's own patience of half a minute, start it again."""
    import ray

    for start in range(_STARTS):
        before = {child.pid for child in psutil.Process().children()}
        try:
            ray.init(**settings)
            return
        # Ray raises errors of many kinds here.
        except Exception as error:
            if start == _STARTS - 1 or "timed out during startup" not in str(error):
                raise BackboneError(_no_ray(settings["address"], error)) from error
            ray.shutdown()  # which knows nothing of the processes of a start that failed
            for child in psutil.Process().children():
                if child.pid not in before:
                    child.kill()
                    child.wait(_SECONDS_TO_END)


def _no_ray(address: str, error: Exception) -> str:
    if address == "local":
        return f"Ray could not be started: {first_line(error)}; if its folder is to blame, {MEND}"
    # Of versions that differ, Ray tells in several lines, and in the cause of what it raises.
    why = " ".join(str(error.__cause__ or error).split())
    return (
        f"{not_joined(address)}: {why}. Start its nodes in this environment, whose Ray and Python it has to have, or "
        "leave trainer_common.ray_address out to have one started for the run"
    )
