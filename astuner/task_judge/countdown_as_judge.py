"""The judge for the game countdown, in which an expression with given numbers must have a given value."""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Literal

from astuner.config.data import TaskJudgeConfig
from astuner.errors import JudgeError, short_repr
from astuner.schema import Judgement, WorkflowOutput, WorkflowTask
from astuner.task_judge.judge_base import BaseJudge, answer_text, of_task, task_value
from astuner.task_judge.math_text import last_boxed

_MAX_CHARACTERS = 300
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_EXPRESSION = re.compile(r"[0-9+\-*/() ]+")
_SIGNS = {"×": "*", "·": "*", r"\times": "*", r"\cdot": "*", "÷": "/", r"\div": "/", "−": "-"}
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class CountdownAsJudge(BaseJudge):
    r"""Computes the expression in the answer; the reward is 1.0 if it has the target's value.

    The expression is the last `<answer>…</answer>`, else the last `\boxed{…}`, else the last line of the answer. It
    consists of whole numbers, `+ - * /` and parentheses; what follows an `=` is ignored. It is parsed, not executed,
    and computed with exact fractions.

    Args:
        use: `exactly_once`: each given number must be used once; `at_most_once`: some may be left out.
        legal_reward: the reward of an expression that uses the numbers as required and has another value.
        numbers_field, target_field: the numbers and the target in the metadata of the task.
        answer_field: the answer in the metadata of the workflow's output.
    """

    def __init__(
        self,
        config: TaskJudgeConfig,
        *,
        use: Literal["exactly_once", "at_most_once"] = "exactly_once",
        legal_reward: float = 0.0,
        numbers_field: str = "numbers",
        target_field: str = "target",
        answer_field: str = "final_answer",
    ) -> None:
        super().__init__(config)
        if use not in ("exactly_once", "at_most_once"):
            raise ValueError(f"use is {use!r}; expected exactly_once or at_most_once")
        self.use, self.legal_reward = use, legal_reward
        self.numbers_field, self.target_field, self.answer_field = numbers_field, target_field, answer_field

    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Judgement:
        """Score one episode; the components are `legal` (the numbers are used as required) and `correct`.

        Raises:
            JudgeError: the answer, the numbers or the target are missing or of another type.
        """
        name = type(self).__name__
        numbers = task_value(workflow_task, self.numbers_field, name)
        numbers = numbers.tolist() if hasattr(numbers, "tolist") else numbers  # numpy, from a Parquet file
        target = task_value(workflow_task, self.target_field, name)
        if not isinstance(numbers, list | tuple) or not numbers or not all(map(_is_whole, numbers)):
            self._reject(workflow_task, self.numbers_field, numbers, "a list of whole numbers")
        if not _is_whole(target):
            self._reject(workflow_task, self.target_field, target, "a whole number")
        expression = countdown_expression(answer_text(workflow_output, self.answer_field, name))
        try:
            value, used = evaluate_expression(expression)
        except ValueError as error:
            return self._judgement(legal=False, correct=False, why=str(error))
        surplus, unused = Counter(used) - Counter(numbers), Counter(numbers) - Counter(used)
        if surplus:
            return self._judgement(legal=False, correct=False, why=f"{expression} uses {_listed(surplus)} too often")
        if unused and self.use == "exactly_once":
            return self._judgement(legal=False, correct=False, why=f"{expression} does not use {_listed(unused)}")
        why = "" if value == target else f"{expression} is {value}, not {target}"
        return self._judgement(legal=True, correct=value == target, why=why)

    def _judgement(self, *, legal: bool, correct: bool, why: str) -> Judgement:
        reward = 1.0 if correct else self.legal_reward if legal else 0.0
        return Judgement(reward, correct, {"legal": float(legal), "correct": float(correct)}, explanation=why)

    def _reject(self, workflow_task: WorkflowTask, key: str, value: object, expected: str) -> None:
        raise JudgeError(f"{key!r} in {of_task(workflow_task)} is {short_repr(value)}; expected {expected}.")


def countdown_expression(answer: str) -> str:
    """Return the expression in an answer, with the operators of Python."""
    marked = _ANSWER.findall(answer)
    text = marked[-1] if marked else last_boxed(answer) or answer.strip().rpartition("\n")[2]
    for sign, replacement in _SIGNS.items():
        text = text.replace(sign, replacement)
    return text.partition("=")[0].strip()


def evaluate_expression(expression: str) -> tuple[Fraction, list[int]]:
    """Return the value of an arithmetic expression with whole numbers, and the numbers in it.

    Args:
        expression: whole numbers, `+ - * /` and parentheses.

    Raises:
        ValueError: the expression is invalid, is longer than 300 characters, or divides by 0.
    """
    if len(expression) > _MAX_CHARACTERS or not _EXPRESSION.fullmatch(expression):
        raise ValueError("the answer has no expression of whole numbers, + - * / and parentheses")
    try:
        root = ast.parse(expression, mode="eval").body
        numbers: list[int] = []
        return _value(root, numbers), numbers
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{expression} is not an expression") from None
    except ZeroDivisionError:
        raise ValueError(f"{expression} divides by 0") from None


def _value(node: ast.expr, numbers: list[int]) -> Fraction:
    """Return the value of a node, and append the numbers in it to `numbers`."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        numbers.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, numbers)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left, numbers), _value(node.right, numbers))
    raise SyntaxError


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _listed(numbers: Counter[Any]) -> str:
    return ", ".join(str(number) for number in sorted(numbers))
