"""Whether verl's rollout engines can still answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from astuner.errors import ModelError
from astuner.model_tuner import first_line

_PATIENCE = 60.0


def refuse_lost_engines(servers: Sequence[Any]) -> None:
    """Say so where an engine can no longer answer.

    Args:
        servers: the engines' actors.

    Raises:
        ModelError: with what ended it, and how to go on.
    """
    # Ours says so itself; verl's have no method for it.
    asked = [
        server.ready.remote() if hasattr(server, "ready") else server.__ray_call__.remote(_trouble)
        for server in servers
    ]
    for number, answer in enumerate(asked):
        try:
            trouble = ray.get(answer, timeout=_PATIENCE)
        except RayError as error:
            raise _gone(number, len(servers), first_line(error)) from error
        if isinstance(trouble, str):
            raise _gone(number, len(servers), trouble)


def _gone(number: int, of: int, trouble: str) -> ModelError:
    which = "a rollout engine" if of == 1 else f"rollout engine {number + 1} of {of}"
    return ModelError(f"{which} is gone: {trouble}. The same command goes on from the last checkpoint")


def _trouble(server: Any) -> str | None:
    """Return what is wrong with one of verl's servers, in whose process this runs.

    vLLM computes in processes of its own, which the server outlives. What watches over them has vLLM's
    `AsyncLLM.check_health` raise.
    """
    engine = getattr(server, "engine", None)  # a server on a further node of a replica has none
    if engine is None or not getattr(engine, "errored", False):
        return None
    return "vLLM's engine process (EngineCore) has ended, while the server around it is still there"
