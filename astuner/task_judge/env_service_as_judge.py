"""The judge for tasks of environments."""

from __future__ import annotations

from collections.abc import Mapping

from astuner.errors import JudgeError
from astuner.schema import WorkflowOutput, WorkflowTask
from astuner.task_judge.judge_base import BaseJudge


class EnvServiceJudge(BaseJudge):
    """Scores an episode with the environment of its task: the reward is `Evaluation.score`.

    If the environment has several agents, the reward has the scores of the agents by name.
    """

    async def compute_reward(
        self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput
    ) -> tuple[float | Mapping[str, float], bool]:
        """Score one episode.

        Raises:
            JudgeError: the task has no environment.
            EnvError: the environment failed.
        """
        if workflow_task.env is None:
            raise JudgeError(
                "EnvServiceJudge scores tasks of an environment, and this task has none; set "
                "astuner.task_reader.type: env_service, or another task_judge.judge_protocol"
            )
        evaluation = await workflow_task.env.evaluate()
        score, success = evaluation.score, evaluation.is_success
        if success is None:
            values = list(score.values()) if isinstance(score, Mapping) else [score]
            success = sum(values) > 0
        return score, success
