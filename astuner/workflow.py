"""The base class of workflows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from astuner.model_tuner import ModelTuner
    from astuner.schema import WorkflowOutput, WorkflowTask


class Workflow(ABC):
    """Base class of the agent programs to tune; subclasses implement `execute`.

    Each episode has its own instance, so attributes of `self` can hold the state of the episode.
    """

    name: str = ""

    @abstractmethod
    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        """Run one episode.

        Args:
            workflow_task: the task and the identity of the episode.
            model_tuner: the model in training; pass it to the agent as its model.

        Returns:
            The output. The configured judge is called only if `reward` is None.
        """
