"""`task_reader.filters`, as far as they act when the tasks are read."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from astuner.config.data import TaskReaderConfig
from astuner.errors import PluginError, TaskDataError
from astuner.schema import Task, TaskSet
from astuner.task_reader import describe_left_out
from astuner.task_reader.filters import apply_filters, prompt_text


def filtered(tasks: Sequence[Task], *filters: dict[str, Any], validation: Sequence[Task] = ()) -> TaskSet:
    config = TaskReaderConfig.model_validate({"filters": list(filters)})
    return apply_filters(
        TaskSet(tuple(tasks), tuple(validation)),
        config.filters,
        count_tokens=lambda text: len(text.split()),
        search=[Path(__file__).parent],
    )


def questions(*texts: str) -> list[Task]:
    return [Task(str(number), text) for number, text in enumerate(texts)]


def kept(tasks: TaskSet) -> list[str]:
    return [task.main_query for task in tasks.training]


def test_length_in_characters_and_tokens() -> None:
    texts = questions("ab", "abc", "abcd", "a b", "a b c")
    result = filtered(texts, {"type": "length", "min": 3, "max": 4})
    assert kept(result) == ["abc", "abcd", "a b"]
    assert result.left_out == {"shorter than 3 characters": 1, "longer than 4 characters": 1}
    assert kept(filtered(texts, {"type": "length", "unit": "tokens", "min": 2})) == ["a b", "a b c"]


def test_the_length_is_that_of_messages_and_question() -> None:
    parts = [{"type": "text", "text": "four"}, {"type": "image_url", "image_url": {"url": "x" * 99}}]
    messages = ({"role": "system", "content": "three"}, {"role": "user", "content": parts}, {"role": "user"})
    assert prompt_text(Task("1", "five", messages)) == "three\nfour\nfive"
    assert prompt_text(Task("1", "", messages)) == "three\nfour"
    (task,) = filtered([Task("1", "five", messages)], {"type": "length", "min": 15, "max": 15}).training
    assert task.task_id == "1"


def test_filters_are_applied_in_order_and_counted_by_cause() -> None:
    tasks = questions("one apple", "two pears", "three apples", "fig")
    regex = {"type": "regex", "pattern": "apples?$"}
    result = filtered(tasks, {"type": "length", "min": 4}, regex)
    assert kept(result) == ["one apple", "three apples"]
    assert result.left_out == {"shorter than 4 characters": 1, "main_query does not match 'apples?$'": 1}
    assert filtered(tasks, regex, {"type": "length", "min": 4}).left_out == {"main_query does not match 'apples?$'": 2}
    assert describe_left_out(result.left_out) == (
        "2 tasks (1 shorter than 4 characters, 1 main_query does not match 'apples?$')"
    )


def test_regular_expressions_on_fields() -> None:
    tasks = [Task("a1", "x?", metadata={"level": 3}, source="A"), Task("b2", "y?", metadata={"other": None})]
    for entry, expected in (
        ({"pattern": "^a", "field": "task_id"}, ["x?"]),
        ({"pattern": "^a", "field": "task_id", "action": "drop"}, ["y?"]),
        ({"pattern": "A", "field": "source"}, ["x?"]),
        ({"pattern": "3", "field": "level"}, ["x?"]),
        ({"pattern": "3", "field": "level", "action": "drop"}, ["y?"]),
        ({"pattern": "[xy]"}, ["x?", "y?"]),
    ):
        assert kept(filtered(tasks, {"type": "regex", **entry})) == expected, entry
    with pytest.raises(TaskDataError, match=r"no task has the field 'lvl' .* a metadata field: level, other\."):
        filtered(tasks, {"type": "regex", "pattern": "1", "field": "lvl"})


def is_short(task: Task) -> bool:
    return len(task.main_query) < 3


def raises(task: Task) -> bool:
    raise KeyError(task.task_id)


def returns_none(task: Task) -> None:
    return None


def test_functions() -> None:
    here = "test_filters"
    tasks = questions("ab", "abc")
    result = filtered(tasks, {"type": "function", "function": f"{here}->is_short"})
    assert kept(result) == ["ab"]
    assert result.left_out == {f"rejected by {here}->is_short": 1}
    with pytest.raises(TaskDataError, match=rf"{here}->raises, called with task '0', raised KeyError: '0' \(at"):
        filtered(tasks, {"type": "function", "function": f"{here}->raises"})
    with pytest.raises(TaskDataError, match=r"returned None; expected True to keep the task or False"):
        filtered(tasks, {"type": "function", "function": f"{here}->returns_none"})
    with pytest.raises(PluginError, match="has no is_shrt"):
        filtered(tasks, {"type": "function", "function": f"{here}->is_shrt"})


def test_validation_tasks_are_filtered_on_request_only() -> None:
    tasks, held_out = questions("abc"), questions("a", "abc")
    assert len(filtered(tasks, {"type": "length", "min": 3}, validation=held_out).validation) == 2
    result = filtered(tasks, {"type": "length", "min": 3, "validation": True}, validation=held_out)
    assert len(result.validation) == 1
    assert result.left_out == {"shorter than 3 characters": 1}


def test_no_task_left_is_an_error() -> None:
    with pytest.raises(TaskDataError, match=r"left out all training tasks: 2 tasks \(2 shorter than 9 characters\)"):
        filtered(questions("a", "b"), {"type": "length", "min": 9})


def test_a_reader_of_a_mixture_without_a_task_left_is_named(log: list[str]) -> None:
    tasks = TaskSet((Task("a/1", "x", source="a"), Task("b/1", "xyz", source="b")), (), weights={"a": 1, "b": 1})
    entries = TaskReaderConfig.model_validate({"filters": [{"type": "length", "min": 3}]}).filters
    assert len(apply_filters(tasks, entries, count_tokens=len, search=[]).training) == 1
    assert any("left out all training tasks of a; the mixture's other readers" in line for line in log)


def test_a_difficulty_filter_leaves_out_nothing_when_tasks_are_read() -> None:
    assert len(filtered(questions("a", "b"), {"type": "difficulty"}).training) == 2


def test_similar_tasks() -> None:
    base = "A train leaves the station at noon and drives with 80 km/h to the north; when does it arrive in Oslo?"
    tasks = questions(
        base,
        base.upper() + " ",
        base.replace("Oslo", "Bergen"),
        "How many apples are in a basket with three rows of seven?",
        "What is 3 + 4?",
        "What is 3 - 4?",
        "What is 3 + 4 ?",
        "北京是中国的首都吗",
        "北京是中国的首都吗?",
        "上海是中国的首都吗",
    )
    result = filtered(tasks, {"type": "deduplicate", "threshold": 0.7})
    assert [task.task_id for task in result.training] == ["0", "3", "4", "5", "7", "9"]
    assert result.left_out == {"similar to an earlier task (threshold 0.7)": 4}
    exact = filtered(tasks, {"type": "deduplicate", "threshold": 1.0})
    assert [task.task_id for task in exact.training] == ["0", "2", "3", "4", "5", "7", "8", "9"]


def similarity(one: str, other: str) -> float:
    grams = [
        {tuple(text.split()[start : start + 2]) for start in range(len(text.split()) - 1)} for text in (one, other)
    ]
    return len(grams[0] & grams[1]) / len(grams[0] | grams[1])


def test_deduplication_finds_what_the_exact_comparison_of_all_pairs_finds() -> None:
    rng = random.Random(1)
    words = [f"w{number}" for number in range(60)]
    texts = []
    for _ in range(40):
        text = rng.choices(words, k=30)
        texts.append(" ".join(text))
        for changes in (1, 3, 12):
            changed = list(text)
            for place in rng.sample(range(30), changes):
                changed[place] = rng.choice(words)
            texts.append(" ".join(changed))
    expected: list[str] = []
    for text in texts:
        if all(similarity(text, other) < 0.5 for other in expected):
            expected.append(text)
    entry = {"type": "deduplicate", "threshold": 0.5, "ngram": 2, "permutations": 256}
    result = filtered(questions(*texts), entry)
    assert kept(result) == expected == kept(filtered(questions(*texts), entry))


@given(st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=12), st.integers(1, 5))
def test_deduplication_keeps_one_of_equal_texts(texts: list[str], ngram: int) -> None:
    result = filtered(questions(*texts), {"type": "deduplicate", "threshold": 1.0, "ngram": ngram})
    assert len({text.lower() for text in kept(result)}) == len(result.training)
    assert kept(result)[0] == texts[0]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasketch", None)
    with pytest.raises(PluginError, match=r"deduplicate needs package datasketch.*pip install 'astuner\[dedup\]'"):
        filtered(questions("a"), {"type": "deduplicate"})


def test_a_filter_without_an_effect_is_rejected() -> None:
    for entry in ({"type": "length"}, {"type": "length", "min": 4, "max": 3}, {"type": "difficulty", "min": 1}):
        with pytest.raises(ValidationError, match="expected min"):
            TaskReaderConfig.model_validate({"filters": [entry]})
