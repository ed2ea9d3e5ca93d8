"""A judge that reads a file that the agent has written."""

from pathlib import Path

from astuner.task_judge.judge_base import BaseJudge


class AnswerFileAsJudge(BaseJudge):
    def compute_reward(self, workflow_task, workflow_output):
        path = Path(workflow_output.metadata.get("working_folder", ".")) / "answer.txt"
        answer = path.read_text(errors="replace").strip() if path.is_file() else None
        is_success = answer == str(workflow_task.task.metadata["answer"])
        return float(is_success), is_success
