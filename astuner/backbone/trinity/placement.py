"""Keeps Trinity's actors on the command's node, so that the loss of another node does not end the run.

Each process keeps the actors that it starts on its own node, beginning with the main process. The functions are also
called in each of Ray's workers (`worker_process_setup_hook`), so this module imports little.
"""

from __future__ import annotations

from collections.abc import Callable

from astuner.backbone.ray_cluster.environment import export_ray_address
from astuner.backbone.ray_cluster.nodes import on_this_node, override_actor_options

_MODULES = ("trinity.", "astuner.backbone.trinity.")


def keep_all_here() -> Callable[[], None]:
    """Start all Trinity actors on this process's node; return a function that undoes this.

    For a run with a Tinker service, none of whose actors needs a GPU.
    """
    return override_actor_options(lambda module, _: on_this_node() if module.startswith(_MODULES) else {})


def keep_unplaced_here() -> Callable[[], None]:
    """Start Trinity's actors on this node, except for engines and runners, which Trinity places itself."""
    return override_actor_options(
        lambda module, strategy: on_this_node() if strategy is None and module.startswith(_MODULES) else {}
    )


def set_up_gpu_worker() -> None:
    """Prepare a process of a run on GPUs."""
    export_ray_address()
    keep_unplaced_here()
