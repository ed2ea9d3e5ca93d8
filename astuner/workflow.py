"""The base class of users' workflows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from astuner.model_tuner import ModelTuner
    from astuner.schema import WorkflowOutput, WorkflowTask


class Workflow(ABC):
    """An agent program to tune: subclass it and write `execute`.

    A new instance is made for every episode, so `self` may hold the episode's state.
    """

    name: str = ""

    @abstractmethod
    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        """Run one episode.

        Args:
            workflow_task: the task and which episode of it this is.
            model_tuner: the model in training; hand it to the agent as its model.

        Returns:
            The outcome. With `reward=None` the configured judge scores it; otherwise the judge is not asked.
        """
