"""The judge for mathematical answers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pydantic import BaseModel

from astuner.errors import JudgeError, shorten
from astuner.helper_llm.client import NoAnswer
from astuner.schema import Judgement
from astuner.task_judge.fields import answer_text, as_text, of_task, task_value
from astuner.task_judge.judge_base import BaseJudge
from astuner.task_judge.llm.llm_judge import LlmJudge, question_of, undecided, unscored
from astuner.task_judge.llm.prompts import fenced_prompt
from astuner.task_judge.math_text import PlainNumber, final_answer, is_bare_expression, plain_number
from astuner.task_judge.math_verify_process import MathVerifyProcess

if TYPE_CHECKING:
    from astuner.schema import WorkflowOutput, WorkflowTask

_MAX_CHARACTERS = 1000
"""The maximum length of an answer that is marked in the text; longer ones are wrong."""
_MAX_TAIL = 2000
"""The length of the end of a text that is searched for an answer, if no answer is marked."""

_math_verify = MathVerifyProcess()


class MathAnswerAsJudge(BaseJudge):
    r"""Compares `final_answer` in the workflow's metadata with `answer` in the task's; the reward is 1.0 or 0.0.

    The answer is the last complete `\boxed{…}`, else the text after `####`, else the expression that math-verify finds
    in the text. Numbers are compared exactly, after removing thousands separators, currencies and units, and reading
    percent signs; math-verify compares everything else (Kydlíček, https://github.com/huggingface/Math-Verify). An
    answer that is empty, is not mathematical, or takes too long to compare is wrong.
    """

    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> tuple[float, bool]:
        """Score one episode.

        Raises:
            JudgeError: an answer is missing or is neither a text nor a number, the reference is empty, or math-verify
                cannot be started.
        """
        solved = is_same_answer(*_answers(self, workflow_task, workflow_output))
        return float(solved), solved


class SameAnswer(BaseModel):
    """The answer of the LLM: whether two answers are the same; null if it cannot tell."""

    reason: str = ""
    same: bool | None


class MathAnswerAndLlmAsJudge(LlmJudge):
    """Compares answers like `MathAnswerAsJudge`, and asks an LLM where the rule cannot tell.

    The rule decides if the answers are equal, if one is empty, and if both are plain numbers. The LLM decides about all
    others, such as an answer in words or in a notation that the rule cannot read.
    """

    async def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Judgement:
        """Score one episode.

        Raises:
            JudgeError: as for `MathAnswerAsJudge`.
            JudgeUnavailableError: the LLM cannot be asked any more.
        """
        gold, answer = _answers(self, workflow_task, workflow_output)
        # math-verify runs in another process, for which the event loop must not wait.
        if await asyncio.to_thread(is_same_answer, gold, answer):
            return Judgement(1.0, True, explanation="the rule: the answers are the same")
        gold_part, part = final_answer(gold)[0], final_answer(answer)[0]
        if not part.strip() or (_number(gold_part) and _number(part)):
            return Judgement(0.0, False, explanation="the rule: the answers differ")
        form = 'Answer with one JSON object: {"reason": "one sentence", "same": true}. "same" is true, false or null.'
        task = "You decide whether the final answer of a solution is the same as the correct answer to a question."
        texts = {
            "question": question_of(workflow_task, "main_query"),
            "correct answer": gold,
            "solution": answer[-_MAX_TAIL:],
        }
        try:
            result = await self.ask(fenced_prompt(task, texts, form), SameAnswer)
        except NoAnswer as error:
            return unscored(error)
        if result.value.same is None:
            return undecided(result.value.reason, result.usage)
        explanation = f"the LLM: {result.value.reason}"
        same = result.value.same
        return Judgement(float(same), same, explanation=explanation, metrics=result.usage.metrics())


def _answers(judge: BaseJudge, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> tuple[str, str]:
    """Return the reference and the agent's answer.

    Raises:
        JudgeError: one is missing or is neither a text nor a number, or the reference is empty.
    """
    name = type(judge).__name__
    gold = as_text(task_value(workflow_task, "answer", name), "answer", of_task(workflow_task))
    if not gold.strip():
        raise JudgeError(f"task {shorten(workflow_task.task_id)} has an empty `answer`, so no answer can be correct.")
    return gold, answer_text(workflow_output, "final_answer", name)


def is_same_answer(gold: str, answer: str) -> bool:
    """Return whether `answer` equals the reference `gold`.

    Args:
        gold: the reference answer, or a text in which it is marked.
        answer: the agent's answer.

    Raises:
        JudgeError: math-verify cannot be started.
    """
    gold_part, gold_is_marked = final_answer(gold)
    part, is_marked = final_answer(answer)
    if not part or (is_marked and len(part) > _MAX_CHARACTERS):
        return False
    if part.split() == gold_part.split():
        return True
    gold_number, number = _number(gold_part), _number(part)
    if gold_number and number:
        if number.equals(gold_number):
            return True
        if number.is_whole and gold_number.is_whole:
            return False
    return _math_verify.is_same(
        [gold_number.text] if gold_number else _readings(gold_part, gold_is_marked),
        [number.text] if number else _readings(part, is_marked),
    )


def _number(part: str) -> PlainNumber | None:
    return plain_number(part) if len(part) <= _MAX_CHARACTERS else None


def _readings(part: str, is_marked: bool) -> list[str]:
    """Return the candidate texts of an answer that math-verify parses, the best one first."""
    boxed = rf"\boxed{{{part}}}"
    if is_marked:
        return [boxed]
    tail = part[-_MAX_TAIL:]
    return [boxed, tail] if len(part) <= _MAX_CHARACTERS and is_bare_expression(part) else [tail]
