"""The ready judges for exact answers, regular expressions, JSON schemas and countdown."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astuner.config.data import TaskJudgeConfig
from astuner.errors import JudgeError
from astuner.schema import Judgement, Task, WorkflowOutput, WorkflowTask
from astuner.task_judge.countdown_as_judge import CountdownAsJudge, countdown_expression, evaluate_expression
from astuner.task_judge.exact_answer_as_judge import ExactAnswerAsJudge
from astuner.task_judge.json_schema_as_judge import JsonSchemaAsJudge
from astuner.task_judge.judge_base import make_judge
from astuner.task_judge.regex_as_judge import RegexAsJudge
from tests.examples import examples

CONFIG = TaskJudgeConfig()
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "people": {"type": "integer", "minimum": 0}},
    "required": ["city"],
}


def judged(judge: Any, answer: object, /, **metadata: object) -> Judgement:
    task = WorkflowTask(Task("t", "?", metadata=metadata), episode_id="e")
    result = judge.compute_reward(task, WorkflowOutput(metadata={"final_answer": answer}))
    assert isinstance(result, Judgement)
    return result


@pytest.mark.parametrize(
    ("answer", "reference", "options", "right"),
    [
        ("Paris", "Paris", {}, True),
        ("  Paris\n", "Paris", {}, True),
        ("New   York", "New York", {}, True),
        ("paris", "Paris", {}, False),
        ("PARIS", "Paris", {"ignore_case": True}, True),
        ("Paris.", "Paris", {}, False),
        ("", "Paris", {}, False),
        (None, "Paris", {}, False),
        (4, "4", {}, True),
        ("4", np.int64(4), {}, True),
        ("b", ["a", "b"], {}, True),
        ("c", ("a", "b"), {}, False),
    ],
)
def test_exact_answers(answer: object, reference: object, options: dict[str, bool], right: bool) -> None:
    result = judged(ExactAnswerAsJudge(CONFIG, **options), answer, answer=reference)
    assert (result.reward, result.is_success) == (float(right), right)
    assert bool(result.explanation) is not right


@pytest.mark.parametrize(("reference", "text"), [("", "is empty"), ([], "is empty"), ({"a": 1}, "of type dict")])
def test_a_reference_that_no_answer_can_equal_is_an_error(reference: object, text: str) -> None:
    with pytest.raises(JudgeError, match=text):
        judged(ExactAnswerAsJudge(CONFIG), "a", answer=reference)


def test_missing_fields_are_named() -> None:
    with pytest.raises(JudgeError, match=r"task t has no 'answer', which ExactAnswerAsJudge needs. Its keys: solution"):
        judged(ExactAnswerAsJudge(CONFIG), "a", solution="a")
    with pytest.raises(JudgeError, match=r"has no 'reply', which RegexAsJudge needs. Its keys: final_answer"):
        judged(RegexAsJudge(CONFIG, pattern="a", answer_field="reply"), "a")


def test_regular_expressions() -> None:
    searches = RegexAsJudge(CONFIG, pattern=r"<answer>.+</answer>\s*$")
    assert judged(searches, "so\n<answer>4\n5</answer>\n").reward == 1.0
    assert judged(searches, "<answer></answer>").reward == 0.0
    covers = RegexAsJudge(CONFIG, pattern=r"\d+", match="fullmatch", max_characters=5)
    assert [judged(covers, text).reward for text in ("123", "123 ", "123456")] == [1.0, 0.0, 0.0]
    assert "more than 5 characters" in judged(covers, "123456").explanation
    with pytest.raises(ValueError, match="expected search or fullmatch"):
        RegexAsJudge(CONFIG, pattern="a", match="match")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("answer", "components", "why"),
    [
        ('{"city": "Oslo", "people": 7}', (1, 1), ""),
        ('Here:\n```json\n{"city": "Oslo"}\n```\nDone.', (1, 1), ""),
        ('```\n{"city": 1}\n```\n```json\n{"city": "Oslo"}\n```', (1, 1), ""),
        ('{"people": 7}', (1, 0), r"1 errors; at \$: 'city' is a required property"),
        ('{"city": "Oslo", "people": -1}', (1, 0), r"at \$.people: -1 is less than"),
        ("Oslo", (0, 0), "not JSON"),
        ('{"city": "Oslo", "people": NaN}', (0, 0), "NaN is not JSON"),
        ("[" * 100_000, (0, 0), "not JSON"),
        ("", (0, 0), "not JSON"),
    ],
)
def test_json_schema(answer: str, components: tuple[int, int], why: str) -> None:
    for judge, metadata in (
        (JsonSchemaAsJudge(CONFIG, schema=SCHEMA), {}),
        (JsonSchemaAsJudge(CONFIG), {"schema": SCHEMA}),
    ):
        result = judged(judge, answer, **metadata)
        assert result.components == dict(zip(("json", "schema"), components, strict=True))
        assert (result.reward, result.is_success) == (components[1], components[1] == 1)
        assert re.search(why, result.explanation)


def test_invalid_schemas_are_errors_of_the_judge_not_of_the_answer() -> None:
    with pytest.raises(ValueError, match=r"not a JSON schema: at \$.type"):
        JsonSchemaAsJudge(CONFIG, schema={"type": "text"})
    for schema in ("{", "[]", {"type": "text"}, 3):
        with pytest.raises(JudgeError, match="'schema' in the metadata of task t is "):
            judged(JsonSchemaAsJudge(CONFIG), "{}", schema=schema)


def test_references_of_a_schema_are_not_loaded() -> None:
    judge = JsonSchemaAsJudge(CONFIG, schema={"$ref": "http://127.0.0.1:9/schema.json"})
    with pytest.raises(JudgeError, match=r"the schema cannot be applied: .*127\.0\.0\.1:9"):
        judged(judge, "{}")


@pytest.mark.parametrize(
    ("answer", "legal", "correct", "why"),
    [
        ("<answer>(3 + 5) * 2</answer>", 1, 1, ""),
        ("I try <answer>1</answer>, then <answer>2 * (5 + 3)</answer>", 1, 1, ""),
        (r"so \boxed{2 \times (5 + 3)}", 1, 1, ""),
        ("first\n(3+5)×2 = 16", 1, 1, ""),
        ("-(3 - 5) * 8", 0, 0, "uses 8 too often"),
        ("3 + 5 + 2", 1, 0, "is 10, not 16"),
        ("3 + 5 / 2", 1, 0, "is 11/2, not 16"),
        ("3 * 5", 0, 0, "does not use 2"),
        ("3 * 5 + 2 / 2", 0, 0, "uses 2 too often"),
        ("16", 0, 0, "uses 16 too often"),
        ("3 + 5 - 2 / (2 - 2)", 0, 0, "divides by 0"),
        ("3 5 2", 0, 0, "is not an expression"),
        ("2 ** 5 - 3", 0, 0, "is not an expression"),
        ("2 // 5 + 3", 0, 0, "is not an expression"),
        ("3_5 + 2", 0, 0, "no expression"),
        ("3.0 + 5 + 2", 0, 0, "no expression"),
        ("٣ + 5 + 2", 0, 0, "no expression"),
        ("__import__('os')._exit(1)", 0, 0, "no expression"),
        ("(" * 290 + "3", 0, 0, "is not an expression"),
        ("(3 + 5) * 2 " * 100, 0, 0, "no expression"),
        ("", 0, 0, "no expression"),
    ],
)
def test_countdown(answer: str, legal: int, correct: int, why: str) -> None:
    result = judged(CountdownAsJudge(CONFIG, legal_reward=0.1), answer, numbers=[3, 5, 2], target=16)
    assert result.components == {"legal": legal, "correct": correct}
    assert (result.reward, result.is_success) == (1.0 if correct else 0.1 * legal, correct == 1)
    assert why in result.explanation


def test_countdown_may_leave_numbers_out() -> None:
    judge = CountdownAsJudge(CONFIG, use="at_most_once")
    assert judged(judge, "3 * 5", numbers=[3, 5, 2], target=15).reward == 1.0
    assert judged(judge, "3 * 5", numbers=np.array([3, 5, 5]), target=np.int64(15)).reward == 1.0
    assert judged(judge, "5 + 5 + 5", numbers=[3, 5, 5], target=15).reward == 0.0
    assert judged(CountdownAsJudge(CONFIG), "5 + 5", numbers=[5, 5], target=10).reward == 1.0


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        ({"numbers": "3 5", "target": 8}, "'numbers' .* is '3 5'; expected a list of whole numbers"),
        ({"numbers": [], "target": 8}, "expected a list of whole numbers"),
        ({"numbers": [3, 5.5], "target": 8}, "expected a list of whole numbers"),
        ({"numbers": [3, 5], "target": "8"}, "'target' .* is '8'; expected a whole number"),
        ({"numbers": [3, 5]}, "has no 'target'"),
    ],
)
def test_countdown_tasks_without_numbers_are_errors(metadata: dict[str, object], text: str) -> None:
    with pytest.raises(JudgeError, match=text):
        judged(CountdownAsJudge(CONFIG), "3 + 5", **metadata)


expressions = st.recursive(
    st.integers(0, 99).map(lambda n: (str(n), Fraction(n), [n])),
    lambda inner: (
        st.tuples(inner, st.sampled_from("+-*/"), inner)
        .filter(lambda part: part[1] != "/" or part[2][1] != 0)
        .map(
            lambda part: (
                f"({part[0][0]} {part[1]} {part[2][0]})",
                {
                    "+": lambda a, b: a + b,
                    "-": lambda a, b: a - b,
                    "*": lambda a, b: a * b,
                    "/": lambda a, b: a / b,
                }[part[1]](part[0][1], part[2][1]),
                part[0][2] + part[2][2],
            )
        )
    ),
    max_leaves=8,
)


@settings(max_examples=examples(100), deadline=None)
@given(expressions)
def test_expressions_are_computed_exactly(expression: tuple[str, Fraction, list[int]]) -> None:
    text, value, numbers = expression
    assert evaluate_expression(text) == (value, numbers)
    assert countdown_expression(f"<answer> {text} = {value}</answer>") == text


def test_judges_are_created_from_a_configuration() -> None:
    paths = {
        "exact_answer_as_judge->ExactAnswerAsJudge": {"ignore_case": True},
        "regex_as_judge->RegexAsJudge": {"pattern": "a"},
        "json_schema_as_judge->JsonSchemaAsJudge": {"schema": SCHEMA},
        "countdown_as_judge->CountdownAsJudge": {"use": "at_most_once"},
    }
    for path, params in paths.items():
        judge = make_judge(f"astuner.task_judge.{path}", CONFIG, params)
        assert type(judge).__name__ == path.partition("->")[2]
