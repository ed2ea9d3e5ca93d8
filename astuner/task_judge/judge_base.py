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

    def close(self) -> None:
        """Release what the judge holds, such as connections. Called once, at the end of the run."""
        return


class BaseGroupJudge(BaseJudge):
    """Base class for judges that score all of a task's episodes together, for example by ranking them.

    `compute_group_rewards` is called when the last of the task's `rollout.num_repeat` episodes has ended. Episodes that
    failed, or whose workflow returned a reward, are left out. If a single episode is left, as in greedy validation,
    `compute_reward` is called for it.
    """

    @abstractmethod
    def compute_group_rewards(
        self, workflow_task: WorkflowTask, workflow_outputs: Sequence[WorkflowOutput]
    ) -> Sequence[tuple[Score, bool] | Judgement] | Awaitable[Sequence[tuple[Score, bool] | Judgement]]:
        """Score the episodes of one task; may be a synchronous or an `async` method.

        Args:
            workflow_task: the task, as given to the first of the episodes; its environment has ended.
            workflow_outputs: the outputs of at least two episodes, whose metadata are JSON values.

        Returns:
            The results of the episodes, in the same order, each as from `compute_reward`.

        Raises:
            UnscoredError: the episodes cannot be scored.
        """
