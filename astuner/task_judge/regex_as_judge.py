"""The judge for answers that must match a regular expression."""

from __future__ import annotations

import re
from typing import Literal

from astuner.config.data import TaskJudgeConfig
from astuner.schema import Judgement, WorkflowOutput, WorkflowTask
from astuner.task_judge.judge_base import BaseJudge, answer_text


class RegexAsJudge(BaseJudge):
    r"""Matches the answer with a regular expression; the reward is 1.0 or 0.0.

    The expression is Python's (`re`), with `DOTALL`. It is matched in the process of the run: a pattern with nested
    repetitions, such as `(a+)+$`, can block it.

    Args:
        pattern: the expression, for example `^<think>.+</think>\s*<answer>.+</answer>$`.
        match: `search` finds it anywhere in the answer, `fullmatch` must cover the whole answer.
        answer_field: the answer in the metadata of the workflow's output.
        max_characters: a longer answer does not match.
    """

    def __init__(
        self,
        config: TaskJudgeConfig,
        *,
        pattern: str,
        match: Literal["search", "fullmatch"] = "search",
        answer_field: str = "final_answer",
        max_characters: int = 100_000,
    ) -> None:
        super().__init__(config)
        if match not in ("search", "fullmatch"):
            raise ValueError(f"match is {match!r}; expected search or fullmatch")
        compiled = re.compile(pattern, re.DOTALL)
        self._matches = compiled.search if match == "search" else compiled.fullmatch
        self.answer_field, self.max_characters = answer_field, max_characters

    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Judgement:
        """Score one episode.

        Raises:
            JudgeError: the answer is missing, or is neither a text nor a number.
        """
        answer = answer_text(workflow_output, self.answer_field, type(self).__name__)
        if len(answer) > self.max_characters:
            return Judgement(0.0, False, explanation=f"the answer has more than {self.max_characters:,} characters")
        is_right = self._matches(answer) is not None
        return Judgement(float(is_right), is_right, explanation="" if is_right else "the answer does not match")
