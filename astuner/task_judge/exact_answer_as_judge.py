"""The judge for answers that must equal a reference."""

from __future__ import annotations

from astuner.config.data import TaskJudgeConfig
from astuner.errors import JudgeError
from astuner.schema import Judgement, WorkflowOutput, WorkflowTask
from astuner.task_judge.judge_base import BaseJudge, answer_text, as_text, of_task, task_value


class ExactAnswerAsJudge(BaseJudge):
    """Compares the answer with the reference text; the reward is 1.0 or 0.0.

    White space around and between words is not compared.

    Args:
        answer_field: the answer in the metadata of the workflow's output.
        reference_field: the reference in the metadata of the task: a text, a number, or a list of accepted ones.
        ignore_case: whether upper and lower case are equal.
    """

    def __init__(
        self,
        config: TaskJudgeConfig,
        *,
        answer_field: str = "final_answer",
        reference_field: str = "answer",
        ignore_case: bool = False,
    ) -> None:
        super().__init__(config)
        self.answer_field, self.reference_field, self.ignore_case = answer_field, reference_field, ignore_case

    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Judgement:
        """Score one episode.

        Raises:
            JudgeError: the answer or the reference is missing, is neither a text nor a number, or the reference is
                empty.
        """
        name = type(self).__name__
        value = task_value(workflow_task, self.reference_field, name)
        accepted = list(value) if isinstance(value, list | tuple) else [value]
        owner = of_task(workflow_task)
        references = [self._normalised(as_text(item, self.reference_field, owner)) for item in accepted]
        if not all(references) or not references:
            raise JudgeError(f"{self.reference_field!r} in {owner} is empty, so no answer can be correct.")
        answer = self._normalised(answer_text(workflow_output, self.answer_field, name))
        is_right = answer in references
        return Judgement(float(is_right), is_right, explanation="" if is_right else f"expected {references[0]!r}"[:300])

    def _normalised(self, text: str) -> str:
        joined = " ".join(text.split())
        return joined.casefold() if self.ignore_case else joined
