"""astuner: reinforcement-learning fine-tuning for LLM agents."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from astuner.breakpoints import bp
    from astuner.job import AstunerJob
    from astuner.model_tuner import ModelTuner
    from astuner.schema import WorkflowOutput, WorkflowTask
    from astuner.workflow import Workflow

__all__ = ["AstunerJob", "ModelTuner", "Workflow", "WorkflowOutput", "WorkflowTask", "bp"]
__version__ = "0.1.0"

# For PyTorch's OpenMP, which reads it when PyTorch is first imported: a thread without work sleeps after some 30 µs,
# where it would keep its core busy for milliseconds. Beside other busy processes (an agent's tools, say) a step of
# a small model takes several times as long otherwise; alone it takes a twentieth longer.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# Loaded on first use, so that `import astuner` stays light.
_HOMES = {
    "AstunerJob": "astuner.job",
    "ModelTuner": "astuner.model_tuner",
    "Workflow": "astuner.workflow",
    "WorkflowOutput": "astuner.schema",
    "WorkflowTask": "astuner.schema",
    "bp": "astuner.breakpoints",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'astuner' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
