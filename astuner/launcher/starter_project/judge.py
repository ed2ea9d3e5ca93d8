"""The judge: what an episode is worth."""

from astuner import WorkflowOutput, WorkflowTask
from astuner.task_judge.judge_base import BaseJudge


class DigitsJudge(BaseJudge):
    """Likes digits: the reward is their share of the answer, which even a random model can learn."""

    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> tuple[float, bool]:
        """Return the reward, and whether the task was solved."""
        said = str(workflow_output.metadata["said"])
        share = sum(character in "0123456789" for character in said) / max(len(said), 1)
        return share, share == 1.0
