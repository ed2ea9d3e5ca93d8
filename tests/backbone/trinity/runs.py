"""Runs of the trinity backbone on a random model."""

from __future__ import annotations

from pathlib import Path

from astuner import AstunerJob
from tests.backbone.verl.runs import make_job


def trinity_job(model: Path, folder: Path, workflow: str = "Letters", **settings: object) -> AstunerJob:
    """Return a job whose steps have 2 tasks × 4 episodes."""
    return make_job(workflow, model, folder, **{"backbone": "trinity", **settings})
