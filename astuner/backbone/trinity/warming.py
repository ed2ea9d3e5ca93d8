"""Processes that have imported Trinity before it asks Ray for them.

Trinity starts its actors one after the other, each of which then imports the same: most of the time to the first
step. Ray gives an actor an idle process where there is one.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import ray

# Explorer, trainer, synchronizer, queue, model and coordinator; episode runners come beside.
_ACTORS = 6
_MODULES = (
    "trinity.explorer.explorer",
    "trinity.explorer.workflow_runner",
    "trinity.trainer.tinker.tinker_trainer",
    "trinity.common.models.tinker_model",
    "astuner.backbone.trinity.workflow",
    "astuner.backbone.trinity.credit",
)


def warm(runners: int) -> None:
    """Have as many processes as Trinity will ask for begin to import what its actors do; do not wait for them."""
    task = ray.remote(_import_all).options(num_cpus=0)
    for _ in range(_ACTORS + runners):
        task.remote(_MODULES)


def _import_all(modules: Sequence[str]) -> None:
    for module in modules:
        importlib.import_module(module)
