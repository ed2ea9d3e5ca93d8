"""The base class of judges."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from astuner.config.data import TaskJudgeConfig
    from astuner.schema import WorkflowOutput, WorkflowTask


class BaseJudge(ABC):
    """Scores what a workflow has done: subclass it and write `compute_reward`.

    One judge serves a whole run, and scores many episodes at once: a plain `compute_reward` is called from
    several threads, an `async` one runs on the event loop and must not block it.
    """

    def __init__(self, config: TaskJudgeConfig) -> None:
        self.config = config

    @abstractmethod
    def compute_reward(
        self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput
    ) -> tuple[float, bool] | Awaitable[tuple[float, bool]]:
        """Score one episode; may be a plain or an `async` method.

        Args:
            workflow_task: the task, e.g. `workflow_task.task.metadata["answer"]`.
            workflow_output: what the workflow returned, e.g. `workflow_output.metadata["final_answer"]`.

        Returns:
            The reward, a finite number, and whether the task was solved.
        """
