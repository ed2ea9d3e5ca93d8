"""The base class of judges."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from astuner.config.data import TaskJudgeConfig
    from astuner.schema import Judgement, WorkflowOutput, WorkflowTask

Score = float | Mapping[str, float]
"""The reward of an episode, or of its agents by name."""


class BaseJudge(ABC):
    """Base class of judges; subclasses implement `compute_reward`.

    A run has one judge, which scores many episodes concurrently: a synchronous `compute_reward` is called from several
    threads; an `async` one runs on the event loop and must not block it.

    `task_judge.params` sets the further parameters of a subclass: `def __init__(self, config, *, pattern: str)`.
    """

    def __init__(self, config: TaskJudgeConfig) -> None:
        self.config = config

    @classmethod
    def from_params(cls, config: TaskJudgeConfig, params: Mapping[str, Any], search: Sequence[Path] = ()) -> Self:
        """Create the judge from `task_judge.params`; a judge that contains other judges overrides this.

        Args:
            config: the section `task_judge`.
            params: the keyword arguments of the constructor.
            search: folders that are searched for the user's code.
        """
        return cls(config, **params)

    @abstractmethod
    def compute_reward(
        self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput
    ) -> tuple[Score, bool] | Judgement | Awaitable[tuple[Score, bool] | Judgement]:
        """Score one episode; may be a synchronous or an `async` method.

        Args:
            workflow_task: the task; for example `workflow_task.task.metadata["answer"]`.
            workflow_output: the output of the workflow; for example `workflow_output.metadata["final_answer"]`.
                `workflow_output.calls` are the LLM calls of the episode.

        Returns:
            The reward, a finite number or the rewards of the agents by name, and whether the task was solved; or a
            `Judgement`, which can also have components, an explanation, or no reward.

        Raises:
            UnscoredError: the episode cannot be scored, for example because a grading service does not answer.
        """
