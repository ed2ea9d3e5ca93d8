"""astuner: reinforcement-learning fine-tuning for LLM agents."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from astuner.job import AstunerJob
    from astuner.model_tuner import ModelTuner
    from astuner.schema import WorkflowOutput, WorkflowTask
    from astuner.workflow import Workflow

__all__ = ["AstunerJob", "ModelTuner", "Workflow", "WorkflowOutput", "WorkflowTask"]
__version__ = "0.1.0"

# Loaded on first use, so that `import astuner` stays light.
_HOMES = {
    "AstunerJob": "astuner.job",
    "ModelTuner": "astuner.model_tuner",
    "Workflow": "astuner.workflow",
    "WorkflowOutput": "astuner.schema",
    "WorkflowTask": "astuner.schema",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'astuner' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
