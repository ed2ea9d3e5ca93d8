"""The base class of judges."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from astuner.config.data import TaskJudgeConfig
    from astuner.schema import WorkflowOutput, WorkflowTask

Score = float | Mapping[str, float]
"""The reward of an episode, or of its agents by name."""


class BaseJudge(ABC):
    """Base class of judges; subclasses implement `compute_reward`.

    A run has one judge, which scores many episodes concurrently: a synchronous `compute_reward` is called from several
    threads; an `async` one runs on the event loop and must not block it.
    """

    def __init__(self, config: TaskJudgeConfig) -> None:
        self.config = config

    @abstractmethod
    def compute_reward(
        self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput
    ) -> tuple[Score, bool] | Awaitable[tuple[Score, bool]]:
        """Score one episode; may be a synchronous or an `async` method.

        Args:
            workflow_task: the task; for example `workflow_task.task.metadata["answer"]`.
            workflow_output: the output of the workflow; for example `workflow_output.metadata["final_answer"]`.

        Returns:
            The reward, a finite number or the rewards of the agents by name, and whether the task was solved.
        """
