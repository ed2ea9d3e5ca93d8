"""astuner: reinforcement-learning fine-tuning for LLM agents."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from astuner.agent_loop.rewards import discounted_returns
    from astuner.debugging.breakpoints import bp
    from astuner.job import AstunerJob
    from astuner.model_tuner import ModelTuner
    from astuner.schema import AgentStep, WorkflowOutput, WorkflowTask
    from astuner.workflow import Workflow

__all__ = [
    "AgentStep",
    "AstunerJob",
    "ModelTuner",
    "Workflow",
    "WorkflowOutput",
    "WorkflowTask",
    "bp",
    "discounted_returns",
]
__version__ = "0.1.0"

# PyTorch's OpenMP reads this when PyTorch is first imported. Idle threads then sleep after about 30 µs instead of
# spinning for milliseconds. A step of a small model would otherwise take several times as long if other processes, such
# as an agent's tools, are busy. On an idle machine a step takes 5% longer.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# Imported on first use, so that `import astuner` is fast.
_MODULES = {
    "AgentStep": "astuner.schema",
    "AstunerJob": "astuner.job",
    "ModelTuner": "astuner.model_tuner",
    "Workflow": "astuner.workflow",
    "WorkflowOutput": "astuner.schema",
    "WorkflowTask": "astuner.schema",
    "bp": "astuner.debugging.breakpoints",
    "discounted_returns": "astuner.agent_loop.rewards",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'astuner' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
