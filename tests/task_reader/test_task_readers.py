"""Readers of the user, random tasks and mixtures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from astuner.config.data import MAX_SEED_TASKS, TaskReaderConfig
from astuner.errors import ConfigError, PluginError, TaskDataError
from astuner.schema import TaskSet
from astuner.task_reader import read_tasks

READERS = """
from astuner.schema import Task
from astuner.task_reader import BaseTaskReader


class Squares(BaseTaskReader):
    def __init__(self, count, start=1):
        self.numbers = range(start, start + count)

    def training_tasks(self):
        return (Task(str(n), f"What is {n} * {n}?", metadata={"answer": n * n}) for n in self.numbers)


class Both(Squares):
    def validation_tasks(self):
        return [Task("held out", "What is 0 * 0?")]


class Transcripts(BaseTaskReader):
    def training_tasks(self):
        return [Task("1", "", ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}))]


class Without(BaseTaskReader):
    def training_tasks(self):
        return []


class NoMethod(BaseTaskReader):
    pass


class Broken(BaseTaskReader):
    def training_tasks(self):
        yield Task("1", "a?")
        raise KeyError("no such column")


class Rows(BaseTaskReader):
    def training_tasks(self):
        return [{"question": "a?"}]


class Twice(BaseTaskReader):
    def training_tasks(self):
        return [Task("1", "a?"), Task("2", "b?"), Task("1", "c?")]


class NoQuestion(BaseTaskReader):
    def training_tasks(self):
        return [Task("1", "  ")]


class NumberAsId(BaseTaskReader):
    def training_tasks(self):
        return [Task(1, "a?")]


class NotIterable(BaseTaskReader):
    def training_tasks(self):
        return None


class Surrogate(BaseTaskReader):
    def training_tasks(self):
        return [Task("1", "half \\ud83d")]


class NoReader:
    pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own_readers.py").write_text(READERS)
    return tmp_path


def read(folder: Path, transcripts: bool = False, **section: Any) -> TaskSet:
    config = TaskReaderConfig.model_validate(section)
    return read_tasks(config, base_dir=folder, search=[folder], transcripts=transcripts)


def read_own(folder: Path, name: str, transcripts: bool = False, **options: Any) -> TaskSet:
    return read(folder, transcripts, type=f"{folder / 'own_readers.py'}->{name}", options=options)


def test_a_reader_of_the_user_gets_its_options(folder: Path) -> None:
    tasks = read_own(folder, "Squares", count=3, start=4)
    assert [(task.task_id, task.main_query, task.metadata) for task in tasks.training] == [
        ("4", "What is 4 * 4?", {"answer": 16}),
        ("5", "What is 5 * 5?", {"answer": 25}),
        ("6", "What is 6 * 6?", {"answer": 36}),
    ]
    assert tasks.validation == ()
    assert [task.task_id for task in read_own(folder, "Both", count=1).validation] == ["held out"]
    assert read_own(folder, "Transcripts", transcripts=True).training[0].init_messages[1]["content"] == "b"


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("Squares", {}, PluginError, r"could not be created: TypeError: .*missing 1 required .*'count'"),
        ("Squares", {"size": 3}, PluginError, r"could not be created with the options .*'size'.*unexpected keyword"),
        ("Without", {}, TaskDataError, r"training_tasks\(\) returned no tasks"),
        ("NoMethod", {}, PluginError, r"does not define training_tasks"),
        ("Broken", {}, TaskDataError, r"training_tasks\(\) raised KeyError: 'no such column' \(at .*readers\.py:\d"),
        ("Rows", {}, TaskDataError, r"item 1 is \{'question': 'a\?'\}; expected an astuner\.schema\.Task"),
        ("Twice", {}, TaskDataError, r"item 3 has the same task_id '1' as item 1; make the ids unique"),
        ("NoQuestion", {}, TaskDataError, r"item 1: field 'main_query' is empty; expected the question"),
        ("NumberAsId", {}, TaskDataError, r"item 1: task_id is 1; expected a text"),
        ("NotIterable", {}, TaskDataError, r"training_tasks\(\) raised TypeError"),
        ("Surrogate", {}, TaskDataError, r"item 1: field 'main_query' is not valid Unicode at character 6"),
        ("NoReader", {}, PluginError, r"expected one that derives from .*BaseTaskReader"),
        ("Missing", {}, PluginError, r"has no Missing"),
    ],
)  # fmt: skip
def test_faults_of_a_reader_of_the_user_are_named(
    folder: Path, name: str, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        read_own(folder, name, **options)


def test_a_transcript_of_a_reader_of_the_user_needs_an_answer(folder: Path) -> None:
    with pytest.raises(TaskDataError, match=r"item 1: field 'init_messages' has no assistant message to train on"):
        read_own(folder, "Squares", transcripts=True, count=1)


def test_random_tasks_depend_on_the_seed_only(tmp_path: Path) -> None:
    section = {"training_tasks": 40, "validation_tasks": 5, "min_words": 2, "max_words": 4}
    first, again, more, other = (
        read(tmp_path, type="random_dummy", random_dummy=section | changed)
        for changed in ({}, {}, {"training_tasks": 50}, {"seed": 1})
    )
    assert first == again
    assert first.training == more.training[:40]
    assert (len(first.training), len(first.validation)) == (40, 5)
    questions = {task.main_query for task in (*first.training, *first.validation)}
    assert len(questions) == 45
    assert {len(question.split()) for question in questions} == {2, 3, 4}
    assert all(task.metadata["answer"] == task.main_query.split()[0] for task in first.training)
    assert questions.isdisjoint(task.main_query for task in other.training)
    assert read(tmp_path, type="random_dummy", random_dummy={"validation_tasks": 0}).validation == ()


def test_random_tasks_are_transcripts_for_supervised_training(tmp_path: Path) -> None:
    task = read(tmp_path, transcripts=True, type="random_dummy").training[0]
    assert [message["role"] for message in task.init_messages] == ["user", "assistant"]
    assert task.main_query == ""


def test_seeds_of_the_splits_are_disjoint_and_stay_the_same(tmp_path: Path) -> None:
    first, more = (read(tmp_path, type="seeds", count=count, validation_count=3, first_seed=7) for count in (4, 2000))
    assert [task.metadata["seed"] for task in first.training] == [7, 8, 9, 10]
    assert first.validation == more.validation
    # The seeds after those of the largest number of training tasks.
    assert [task.metadata["seed"] for task in more.validation] == [7 + MAX_SEED_TASKS + index for index in range(3)]
    with pytest.raises(ValidationError, match="less than or equal to 1000000"):
        read(tmp_path, type="seeds", count=MAX_SEED_TASKS + 1)
    assert len({task.task_id for task in (*more.training, *more.validation)}) == 2003
    assert read(tmp_path, type="seeds", validation_count=0).validation == ()
    assert len(read(tmp_path, type="seeds").training) == 64


def test_seeds_are_no_transcripts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="algorithm sft trains on transcripts, and a seed has none; set astuner"):
        read(tmp_path, transcripts=True, type="seeds")


def test_seeds_are_part_of_a_mixture(tmp_path: Path) -> None:
    parts = [{"type": "seeds", "count": 2, "validation_count": 0}, {"type": "seeds", "count": 1, "first_seed": 5}]
    assert [task.task_id for task in read(tmp_path, type="mixture", mixture=parts).training] == [
        "seeds/seed-0", "seeds/seed-1", "seeds-2/seed-5",
    ]  # fmt: skip


def test_a_mixture_names_the_reader_of_each_task(folder: Path) -> None:
    rows = [{"id": 1, "question": "a?"}, {"question": 3}]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = {"training": {"file_path": "a.jsonl"}, "validation": {"file_path": "a.jsonl"}, "skip_bad_rows": True}
    own = {"type": f"{folder / 'own_readers.py'}->Squares", "options": {"count": 1}}
    parts = [
        {"type": "dataset_file", "weight": 3, "dataset_file": file},
        own,
        {"type": "dataset_file", "weight": 0.5, "name": "Squares-2", "dataset_file": file},
        own | {"weight": 2},
        {"type": "dataset_file", "dataset_file": file},
    ]
    tasks = read(folder, type="mixture", mixture=parts)
    names = ["dataset_file", "Squares", "Squares-2", "Squares-3", "dataset_file-2"]
    assert [(task.source, task.task_id) for task in tasks.training] == [(name, f"{name}/1") for name in names]
    assert [task.task_id for task in tasks.validation] == ["dataset_file/1", "Squares-2/1", "dataset_file-2/1"]
    assert tasks.weights == dict(zip(names, [3, 1, 0.5, 2, 1], strict=True))
    assert tasks.skipped_rows == 6


def test_the_error_of_a_part_of_a_mixture_names_its_section(folder: Path) -> None:
    (folder / "a.jsonl").write_text("[]\n")
    part = {"type": "dataset_file", "dataset_file": {"training": {"file_path": "a.jsonl"}}}
    with pytest.raises(TaskDataError, match=r"set astuner\.task_reader\.mixture\.1\.dataset_file\.skip_bad_rows: true"):
        read(folder, type="mixture", mixture=[{"type": "random_dummy"}, part])
