"""The judge: computes the reward of an episode."""

from astuner import WorkflowOutput, WorkflowTask
from astuner.task_judge.judge_base import BaseJudge


class DigitsJudge(BaseJudge):
    """Reward answers by their share of digits, which even a random model can learn."""

    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> tuple[float, bool]:
        """Return the reward, and whether the task was solved."""
        answer = str(workflow_output.metadata["final_answer"])
        share = sum(character in "0123456789" for character in answer) / max(len(answer), 1)
        return share, share == 1.0
