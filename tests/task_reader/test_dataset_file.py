"""`task_reader.type: dataset_file`, from file to tasks."""

from __future__ import annotations

import datetime
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loguru import logger

from astuner.config.data import TaskReaderConfig
from astuner.errors import ConfigError, PluginError, TaskDataError
from astuner.schema import TaskSet
from astuner.task_reader import read_tasks
from tests.examples import examples
from tests.work import calls_of


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    logged: list[str] = []
    handle = logger.add(lambda message: logged.append(str(message)), level="WARNING", format="{message}")
    yield logged
    logger.remove(handle)


def write(file: Path, rows: list[Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def read(training: Path | str, validation: Path | str = "", transcripts: bool = False, **section: Any) -> TaskSet:
    config = TaskReaderConfig.model_validate(
        {
            "type": "dataset_file",
            "dataset_file": {
                "training": {"file_path": str(training)},
                "validation": {"file_path": str(validation)},
                **section,
            },
        }
    )
    return read_tasks(config, base_dir=Path("/nowhere"), search=[Path.cwd()], transcripts=transcripts)


def test_fields_become_a_task(tmp_path: Path) -> None:
    row = {"id": 7, "question": "1+1?", "answer": "2", "messages": [{"role": "system", "content": "Be brief."}]}
    (task,) = read(write(tmp_path / "a.jsonl", [row])).training
    assert task.task_id == "7"
    assert task.main_query == "1+1?"
    assert task.init_messages == ({"role": "system", "content": "Be brief."},)
    assert task.metadata == {"question": "1+1?", "answer": "2"}


def test_field_mapping(tmp_path: Path) -> None:
    row = {"key": "a", "id": "not this", "aufgabe": "x?", "question": "not this", "history": None}
    fields = {"task_id": "key", "main_query": "aufgabe", "init_messages": "history"}
    (task,) = read(write(tmp_path / "a.jsonl", [row]), fields=fields).training
    assert (task.task_id, task.main_query, task.init_messages) == ("a", "x?", ())
    assert task.metadata == {"id": "not this", "aufgabe": "x?", "question": "not this"}


@pytest.mark.parametrize("name", ["main_query", "question", "query", "problem", "prompt", "instruction", "input"])
def test_default_names_of_the_question_field(tmp_path: Path, name: str) -> None:
    (task,) = read(write(tmp_path / "a.jsonl", [{"main_query": None, name: "x?"}])).training
    assert task.main_query == "x?"
    assert task.metadata[name] == "x?"


def test_missing_mapped_field_is_an_error(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [{"question": "x?", "id": 1}])
    for field in ("task_id", "main_query", "init_messages"):
        with pytest.raises(TaskDataError, match="line 1: no field 'wrong'; its fields are question, id"):
            read(file, fields={field: "wrong"})


def test_ids_are_stable_and_unique(tmp_path: Path) -> None:
    rows = [{"question": "a", "n": 1}, {"n": 1, "question": "a"}, {"question": "b"}, {"question": "a", "n": 1}]
    ids = [task.task_id for task in read(write(tmp_path / "a.jsonl", rows)).training]
    assert ids[1:2] + ids[3:] == [f"{ids[0]}-2", f"{ids[0]}-3"]
    assert len(set(ids)) == 4
    # Neither the file nor the place in it matters.
    again = [task.task_id for task in read(write(tmp_path / "b.jsonl", rows[2:] + rows[:1])).training]
    assert again == [ids[2], ids[0], ids[1]]
    assert ids[2] == "f6ca83161ada89db"  # `printf %s '{"question":"b"}' | b2sum -l 64`


def test_configured_ids(tmp_path: Path) -> None:
    equal = {"id": "x", "question": "a"}
    rows = [equal, {"id": "x-2", "question": "b"}, equal, {"id": None, "question": "c"}, {"id": "", "question": "d"}]
    ids = [task.task_id for task in read(write(tmp_path / "a.jsonl", rows)).training]
    assert ids[:3] == ["x", "x-2", "x-3"]
    assert all(len(task_id) == 16 for task_id in ids[3:])
    rows.insert(1, {"id": "x", "question": "other"})
    with pytest.raises(TaskDataError, match=r"line 1 and line 2 differ but have the same id 'x'"):
        read(write(tmp_path / "b.jsonl", rows), skip_bad_rows=True)


contents = st.dictionaries(st.sampled_from(["question", "n", "id"]), st.sampled_from(["a", "a-2", "b"]))


@given(st.lists(contents.map(lambda row: {"question": "q", **row}), max_size=12), st.randoms())
@settings(deadline=None, max_examples=examples(60))
def test_ids_are_unique_for_any_rows(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, str]], rng: random.Random
) -> None:
    rows = [*{row.get("id", repr(row)): row for row in rows}.values(), {"question": "q"}]
    rows += rng.choices(rows, k=3)
    file = write(tmp_path_factory.mktemp("ids") / "a.jsonl", rows)
    tasks = read(file).training
    ids = [task.task_id for task in tasks]
    assert len(set(ids)) == len(rows)
    firsts = {row["id"]: number for number, row in reversed(list(enumerate(rows))) if "id" in row}
    assert all(ids[number] == given_id for given_id, number in firsts.items())
    assert [task.task_id for task in read(file).training] == ids


BAD_LINES: list[tuple[bytes, str]] = [
    (b'{"question": "a"', "not JSON: Expecting ',' delimiter at column 1"),
    (b"\xff\xfe", "not UTF-8: invalid start byte at byte 1"),
    (b"[1, 2]", "is of type list; expected an object with named fields"),
    (b"null", "is of type NoneType; expected an object"),
    (b'{"answer": 2}', "no question: none of main_query, question,"),
    (b'{"question": ""}', "field 'question' is empty; expected the question"),
    (b'{"question": " \\n"}', "field 'question' is empty"),
    (b'{"question": 5}', "field 'question' is of type int; expected the question as a string"),
    (b'{"question": "\\ud83d"}', "field 'question' is not valid Unicode at character 1"),
    (b'{"question": "a", "id": 1.5}', "field 'id' is 1.5; expected the id as a string or a whole number"),
    (b'{"question": "a", "id": true}', "field 'id' is True"),
    (b'{"question": "a", "messages": "hi"}', "field 'messages' is of type str; expected a list of chat messages"),
    (b'{"question": "a", "messages": ["hi"]}', "field 'messages', message 1, is of type str"),
    (
        b'{"question": "a", "messages": [{"from": "human"}]}',
        "field 'messages', message 1, has the role None; expected one of system,",
    ),
    (
        b'{"question": "a", "messages": [{"role": "human", "content": ""}]}',
        "field 'messages', message 1, has the role 'human'",
    ),
    (
        b'{"question": "a", "messages": [{"role": "user"}]}',
        "field 'messages', message 1, has neither content nor tool_calls",
    ),
    (
        b'{"question": "a", "messages": [{"role": "user", "content": 3}]}',
        "field 'messages', message 1, has content of type int",
    ),
    (b"[" * 100_000, "not JSON:"),
    (b'{"question": "a", "n": ' + b"9" * 5000 + b"}", "not JSON: Exceeds the limit"),
]


@pytest.mark.parametrize(("line", "reason"), BAD_LINES, ids=[reason[:40] for _, reason in BAD_LINES])
def test_bad_line_is_reported_or_skipped(tmp_path: Path, warnings: list[str], line: bytes, reason: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"question": "one"}\r\n\n' + line + b'\n{"question": "two\xe2\x80\xa8"}')
    with pytest.raises(TaskDataError) as caught:
        read(file)
    assert f"{file}: 1 of 3 rows cannot be read:\n  line 3: {reason}" in str(caught.value)
    assert "set astuner.task_reader.dataset_file.skip_bad_rows: true" in str(caught.value)
    tasks = read(file, skip_bad_rows=True)
    assert [task.main_query for task in tasks.training] == ["one", "two\u2028"]
    assert tasks.skipped_rows == 1
    assert f"line 3: {reason}" in warnings[0]


def test_many_bad_lines_are_counted(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [{"id": [n], "question": "y"} for n in range(25)] + [{"question": "x"}])
    with pytest.raises(TaskDataError) as caught:
        read(file)
    assert "25 of 26 rows" in str(caught.value)
    assert "line 10:" in str(caught.value)
    assert "line 11:" not in str(caught.value)
    assert "and 15 more" in str(caught.value)
    validation = write(tmp_path / "b.jsonl", [{"question": "y"}, {}])
    assert read(file, validation, skip_bad_rows=True).skipped_rows == 26


def test_a_problem_of_many_rows_is_printed_once(tmp_path: Path) -> None:
    table = tmp_path / "a.csv"
    table.write_text("text,answer\n" + "what?,1\n" * 500)
    with pytest.raises(TaskDataError) as caught:
        read(table, fields={"main_query": "question"})
    assert "500 of 500 rows cannot be read:\n  line 2, line 3, line 4 and 497 more: no field 'question'" in str(
        caught.value
    )
    assert str(caught.value).count("its fields are text, answer") == 1
    assert "\n  and " not in str(caught.value)


LONG = "x" * 100_000


@pytest.mark.parametrize(
    "rows",
    [
        [{"question": "a", "id": [LONG]}],
        [{"question": "a", "id": LONG}, {"question": "b", "id": LONG}],
        [{"question": "a", "messages": [{"role": LONG, "content": ""}]}],
        [{LONG: "a"}],
        [{f"{n}{LONG}": "a"} for n in range(30)],
        [{f"column {n}": "a" for n in range(10_000)}],
        [{"messages": [{"role": "assistant", "content": ""}], "tools": LONG}],
    ],
    ids=["type of id", "equal ids", "role", "field", "fields that differ", "many fields", "tools"],
)
def test_long_values_are_shortened_in_messages(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    file = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(TaskDataError) as caught:
        read(file, transcripts="tools" in rows[0])
    assert len(str(caught.value)) < 20_000  # up to 10 rows are described


def test_long_errors_of_a_function_and_long_headers_are_shortened(tmp_path: Path) -> None:
    (tmp_path / "make.py").write_text(
        "def fails():\n    raise ValueError('x' * 100_000)\ndef wrong():\n    return ['x' * 100_000]"
    )
    (tmp_path / "a.csv").write_text(f"{LONG[:50_000]},{LONG[:50_000]}\n1,2\n")
    for path in (f"{tmp_path / 'make.py'}->fails", f"{tmp_path / 'make.py'}->wrong", str(tmp_path / "a.csv")):
        with pytest.raises(TaskDataError) as caught:
            read(path)
        assert len(str(caught.value)) < 5_000


def test_no_tasks(tmp_path: Path, warnings: list[str]) -> None:
    empty = write(tmp_path / "empty.jsonl", [])
    with pytest.raises(TaskDataError, match=r"empty\.jsonl: no training tasks \(it has no rows\)"):
        read(empty)
    with pytest.raises(TaskDataError, match=r"no training tasks \(all 2 rows were skipped\)"):
        read(write(tmp_path / "bad.jsonl", [1, 2]), skip_bad_rows=True)
    assert read(write(tmp_path / "good.jsonl", [{"question": "x"}]), empty).validation == ()
    assert "empty.jsonl: no validation tasks (it has no rows)" in warnings[-1]


def test_csv(tmp_path: Path) -> None:
    file = tmp_path / "a.CSV"
    file.write_bytes(b'\xef\xbb\xbfid,question,answer\n1,"two\nlines, ""q""",007\n\n2,NA,5\n')
    tasks = read(file).training
    assert [(task.task_id, task.main_query) for task in tasks] == [("1", 'two\nlines, "q"'), ("2", "NA")]
    assert [task.metadata["answer"] for task in tasks] == ["007", "5"]
    file.write_text(f'question,answer\n"{"x" * 1_000_000}",1\n')
    assert len(read(file).training[0].main_query) == 1_000_000
    file.write_text("question,answer\nx,1,2,3\ny,2\n")
    with pytest.raises(TaskDataError, match="line 2: 4 cells, but the header has 2"):
        read(file)
    file.write_text("question,question\nx,1\n")
    with pytest.raises(TaskDataError, match="two columns have the same name"):
        read(file)
    file.write_text('question\n"x')
    with pytest.raises(TaskDataError, match="not CSV at line"):
        read(file)
    file.write_bytes(b"question\n\xff")
    with pytest.raises(TaskDataError, match="not UTF-8"):
        read(file)


def test_json(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps([{"question": "x", "answer": 1}, {"question": "y", "answer": "1"}], indent=2))
    assert [task.metadata["answer"] for task in read(file).training] == [1, "1"]
    file.write_text('{"question": "x"}\n{"question": "y"}\n')
    assert len(read(file).training) == 2
    file.write_text('[{"question": "x"}, 5]')
    with pytest.raises(TaskDataError, match="item 2: is of type int"):
        read(file)
    file.write_text('[{"question": "x"},')
    with pytest.raises(TaskDataError, match=r"not JSON: .*line 1 column 20"):
        read(file)


def test_parquet(tmp_path: Path) -> None:
    import datasets

    rows = [{"question": "x", "answer": 5, "messages": None}]
    rows += [{"question": "y", "answer": None, "messages": [{"role": "user", "content": "hi", "name": None}]}]
    folder = tmp_path / "odd [1] *"
    folder.mkdir()
    datasets.Dataset.from_list(rows).to_parquet(folder / "a.parquet")
    first, second = read(folder / "a.parquet").training
    assert (first.main_query, dict(first.metadata)) == ("x", {"question": "x", "answer": 5, "messages": None})
    assert second.init_messages == ({"role": "user", "content": "hi"},)
    assert not datasets.are_progress_bars_disabled()
    odd = [{"question": "x", "on": datetime.datetime(2024, 1, 2), "raw": b"\x00", "price": Decimal("1.50")}]
    datasets.Dataset.from_list(odd).to_parquet(tmp_path / "odd.parquet")
    assert read(tmp_path / "odd.parquet").training[0].task_id == "ef409436597796e6"
    (tmp_path / "bad.parquet").write_text("hello")
    with pytest.raises(TaskDataError, match=r"bad\.parquet: not Parquet"):
        read(tmp_path / "bad.parquet")


def test_transcripts(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": null}'}}
    messages = [
        {"role": "user", "content": "x?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "5"},
        {"role": "assistant", "content": "5"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    file = write(tmp_path / "a.jsonl", [{"messages": messages, "tools": tools, "question": "x?"}])
    (task,) = read(file, transcripts=True).training
    assert task.init_messages == tuple(messages)
    assert task.main_query == ""
    assert task.metadata == {"tools": tools, "question": "x?"}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"question": "x"}, "no transcript: no field messages; its fields are question"),
        ({"messages": [{"role": "user", "content": "x"}]}, "has no assistant message to train on"),
        ({"messages": []}, "has no assistant message to train on"),
        ({"messages": [{"role": "assistant", "content": "x", "weight": 0}]}, "has no assistant message to train on"),
        ({"messages": [{"role": "assistant", "content": "x", "weight": 2}]}, "has the weight 2; expected 1, or 0"),
        ({"messages": [{"role": "assistant", "content": "x"}], "tools": ["f"]}, "field 'tools' is"),
    ],
)
def test_bad_transcripts(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(TaskDataError) as caught:
        read(write(tmp_path / "a.jsonl", [row]), transcripts=True)
    assert f"line 1: {reason}" in str(caught.value) or reason in str(caught.value)


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cwd, base = tmp_path / "cwd", tmp_path / "base"
    for folder in (cwd, base):
        folder.mkdir()
        write(folder / "both.jsonl", [{"question": folder.name}])
    write(base / "only.jsonl", [{"question": "only"}])
    monkeypatch.chdir(cwd)
    for path, question in (("both.jsonl", "cwd"), ("only.jsonl", "only"), ("../base/both.jsonl", "base")):
        config = TaskReaderConfig.model_validate(
            {"type": "dataset_file", "dataset_file": {"training": {"file_path": path}}}
        )
        assert read_tasks(config, base_dir=base, search=[]).training[0].main_query == question


def test_missing_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "train.jsonl", [{"question": "x"}])
    (tmp_path / "notes.txt").write_text("x")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TaskDataError, match=r"no file .*/trian\.jsonl.* Did you mean train\.jsonl\?"):
        read("trian.jsonl")
    with pytest.raises(
        TaskDataError, match=r"cannot read a \.txt file; supported are \.jsonl, \.json, \.csv, \.parquet"
    ):
        read("notes.txt")
    with pytest.raises(TaskDataError, match="is a folder"):
        read(tmp_path)
    with pytest.raises(ConfigError, match=r"training\.file_path is empty"):
        read("")
    with pytest.raises(ConfigError, match="sft trains on transcripts, and an environment has none"):
        read_tasks(TaskReaderConfig(type="env_service"), base_dir=tmp_path, search=[], transcripts=True)


def test_function_returns_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = (
        "from pathlib import Path\n\n\ndef {0}():\n"
        "    Path('made.jsonl').write_text('{{\"question\": \"made\"}}')\n    {1}\n"
    )
    (tmp_path / "maker.py").write_text(
        code.format("path", "return Path('made.jsonl')")
        + code.format("text", "return 'made.jsonl'")
        + code.format("rubbish", "return 5")
        + code.format("fails", "raise OSError('disk full')")
    )
    for name in ("path", "text"):
        assert read(f"maker->{name}").training[0].main_query == "made"
    with pytest.raises(TaskDataError, match="'maker->rubbish' returned 5; expected the path of the file"):
        read("maker->rubbish")
    with pytest.raises(TaskDataError, match=r"raised OSError: disk full \(at .*maker\.py:24\)"):
        read("maker->fails")
    with pytest.raises(PluginError, match="has no paths"):
        read("maker->paths")


def test_the_work_of_reading_grows_with_the_rows(tmp_path: Path) -> None:
    def work(rows: int) -> int:
        name = f"{rows}.jsonl"
        file = write(tmp_path / name, [{"question": f"what is {n} + 1?", "answer": n + 1} for n in range(rows)])
        splits = []
        calls = calls_of(lambda: splits.append(read(file)))
        assert len(splits[0].training) == rows
        return calls

    work(10)  # imports
    assert work(3000) - work(2000) < 1000 * 100


def test_datasets_is_imported_only_when_needed(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [{"question": "x"}])
    code = (
        "import sys\nfrom pathlib import Path\nfrom astuner.config.data import TaskReaderConfig\n"
        "from astuner.task_reader import read_tasks\n"
        f"section = {{'training': {{'file_path': {str(file)!r}}}}}\n"
        "config = TaskReaderConfig.model_validate({'type': 'dataset_file', 'dataset_file': section})\n"
        "assert len(read_tasks(config, base_dir=Path(), search=[]).training) == 1\n"
        "print([name for name in ('datasets', 'pyarrow', 'torch') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
