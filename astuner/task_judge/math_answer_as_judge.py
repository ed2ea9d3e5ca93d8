"""The judge of mathematical answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from astuner.errors import JudgeError
from astuner.task_judge.judge_base import BaseJudge
from astuner.task_judge.math_text import PlainNumber, final_answer, is_bare_expression, plain_number
from astuner.task_judge.math_verify_process import MathVerifyProcess

if TYPE_CHECKING:
    from astuner.schema import WorkflowOutput, WorkflowTask

_MAX_CHARACTERS = 1000
"""Of an answer that is set apart; no honest one is longer."""
_MAX_TAIL = 2000
"""Of a text without a boxed answer: how much of its end is searched."""

_math_verify = MathVerifyProcess()


class MathAnswerAsJudge(BaseJudge):
    r"""Compares `final_answer` of the workflow's metadata with `answer` of the task's: reward 1.0 or 0.0.

    The last complete `\boxed{…}` counts, else what follows `####`, else what math-verify finds in the text.
    Numbers are compared exactly, with thousands separators, currency, units and percent signs understood; all else is
    math-verify's to decide (Kydlíček, https://github.com/huggingface/Math-Verify). An answer that is empty, is no
    mathematics, or takes too long to compare is wrong.
    """

    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> tuple[float, bool]:
        """Score one episode.

        Raises:
            JudgeError: either answer is missing or is no text or number, the reference is empty, or math-verify
                cannot be started.
        """
        gold = _text(workflow_task.task.metadata, "answer", f"the metadata of task {workflow_task.task_id}")
        if not gold.strip():
            raise JudgeError(f"task {workflow_task.task_id} has an empty `answer`, so nothing could be right.")
        answer = _text(workflow_output.metadata, "final_answer", "the workflow's output metadata")
        solved = is_same_answer(gold, answer)
        return float(solved), solved


def is_same_answer(gold: str, answer: str) -> bool:
    """Whether `answer` says the same as the reference `gold`.

    Args:
        gold: the reference: a bare answer, or a text that sets it apart.
        answer: what the agent said.

    Raises:
        JudgeError: math-verify cannot be started.
    """
    gold_part, gold_is_apart = final_answer(gold)
    part, is_apart = final_answer(answer)
    if not part or (is_apart and len(part) > _MAX_CHARACTERS):
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
        [gold_number.text] if gold_number else _readings(gold_part, gold_is_apart),
        [number.text] if number else _readings(part, is_apart),
    )


def _number(part: str) -> PlainNumber | None:
    return plain_number(part) if len(part) <= _MAX_CHARACTERS else None


def _readings(part: str, is_apart: bool) -> list[str]:
    """How math-verify may read an answer that is no plain number, best first."""
    boxed = rf"\boxed{{{part}}}"
    if is_apart:
        return [boxed]
    tail = part[-_MAX_TAIL:]
    return [boxed, tail] if len(part) <= _MAX_CHARACTERS and is_bare_expression(part) else [tail]


def _text(metadata: Mapping[str, Any], key: str, owner: str) -> str:
    """The value under `key` as text; a missing one is an error, and no one (None) is the empty text."""
    if key not in metadata:
        keys = ", ".join(sorted(map(str, metadata))) or "none"
        raise JudgeError(f"{owner} has no {key!r}; MathAnswerAsJudge needs it. Its keys: {keys}.")
    value = metadata[key]
    value = value.item() if hasattr(value, "item") else value  # numpy's numbers
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise JudgeError(f"{key!r} in {owner} is of type {type(value).__name__}; expected a string or a number.")
    return str(value)
