"""astuner: reinforcement-learning fine-tuning for LLM agents."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from astuner.doors import lazy_names

if TYPE_CHECKING:
    from astuner.debugging.breakpoints import bp
    from astuner.job import AstunerJob
    from astuner.model_tuner.tuner import ModelTuner
    from astuner.schema import AgentStep, WorkflowOutput, WorkflowTask
    from astuner.task_judge.judge_base import BaseGroupJudge, BaseJudge
    from astuner.workflow import Workflow
    from astuner.workflows.agent_loop.workflow import discounted_returns

__all__ = [
    "AgentStep",
    "AstunerJob",
    "BaseGroupJudge",
    "BaseJudge",
    "ModelTuner",
    "Workflow",
    "WorkflowOutput",
    "WorkflowTask",
    "bp",
    "discounted_returns",
]
__version__ = "0.1.0"

# PyTorch's OpenMP (libgomp) reads these when PyTorch is first imported. Idle threads then sleep after about 30 µs
# instead of spinning for milliseconds. A step of a small model would otherwise take several times as long if other
# processes, such as an agent's tools, are busy. With the active policy, threads also spin for 3 µs if there are more of
# them than cores, as there are once both the engine and the update have computed. They would otherwise sleep after each
# operation, and sampling of a model of 135 M parameters would take 1.5 times as long. Child processes inherit the
# policy. With LLVM's or Intel's OpenMP, their threads would spin without end, so KMP_BLOCKTIME has its default, 200 ms.
if "OMP_WAIT_POLICY" not in os.environ and "GOMP_SPINCOUNT" not in os.environ and sys.platform == "linux":
    os.environ.update(OMP_WAIT_POLICY="ACTIVE", GOMP_SPINCOUNT="10000")
    os.environ.setdefault("KMP_BLOCKTIME", "200")

# Imported on first use, so that `import astuner` is fast.
_MODULES = {
    "AgentStep": "astuner.schema",
    "AstunerJob": "astuner.job",
    "BaseGroupJudge": "astuner.task_judge.judge_base",
    "BaseJudge": "astuner.task_judge.judge_base",
    "ModelTuner": "astuner.model_tuner.tuner",
    "Workflow": "astuner.workflow",
    "WorkflowOutput": "astuner.schema",
    "WorkflowTask": "astuner.schema",
    "bp": "astuner.debugging.breakpoints",
    "discounted_returns": "astuner.workflows.agent_loop.workflow",
}

__getattr__ = lazy_names(__name__, _MODULES)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
