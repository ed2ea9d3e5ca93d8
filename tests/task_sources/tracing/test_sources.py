"""Reading of traces: OTLP JSON, AgentScope Studio's database, chat logs and run records."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from astuner.errors import TaskDataError
from astuner.task_sources.tracing.reader import read_traces
from astuner.task_sources.tracing.trace import Feedback
from tests.task_sources.tracing.conftest import spans_of, studio_database

USER = {"role": "user", "content": "What is 2 + 2?"}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_spans_of_agentscope(otlp: Path) -> None:
    read = read_traces(otlp)
    (trace,) = read.traces
    assert (read.kind, read.skipped) == ("otlp", 0)
    # The second call of the model extends the first one.
    (conversation,) = trace.conversations
    assert [message["role"] for message in conversation.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert trace.question == "What is 6 times 7?"
    assert conversation.answer == "The result is 42."
    assert conversation.agent == "friday"
    (call,) = conversation.messages[2]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("multiply", {"a": 6, "b": 7})
    assert conversation.messages[3]["content"] == "42"
    assert [tool["function"]["name"] for tool in conversation.tools] == ["multiply"]
    assert trace.start_time > 1.7e9


@pytest.mark.parametrize("nested", [False, True])
def test_the_database_of_studio_has_the_same_traces(otlp: Path, tmp_path: Path, nested: bool) -> None:
    database = studio_database(otlp, tmp_path / "database.sqlite", nested=nested)
    read = read_traces(database)
    assert read.kind == "studio"
    assert read.traces == read_traces(otlp).traces


def test_another_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "database.sqlite"
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE span_table (id text)")
    database.close()
    with pytest.raises(TaskDataError, match=r"span_table has no column traceId, .*expected a database of AgentScope"):
        read_traces(path)


def test_messages_and_evaluations_of_the_semantic_conventions(tmp_path: Path) -> None:
    def text(role: str, content: str) -> dict[str, Any]:
        return {"role": role, "parts": [{"type": "text", "content": content}]}

    def attributes(**values: Any) -> list[dict[str, Any]]:
        kinds = {str: "stringValue", float: "doubleValue"}
        return [
            {"key": "gen_ai." + name.replace("__", "."), "value": {kinds[type(v)]: v}} for name, v in values.items()
        ]

    parts = [{"type": "reasoning", "content": "Two and two."}, {"type": "text", "content": "4"}]
    span = {
        "traceId": "ab",
        "spanId": "cd",
        "name": "chat m",
        "startTimeUnixNano": "5",
        "endTimeUnixNano": "6",
        "attributes": attributes(
            operation__name="chat",
            system_instructions=json.dumps([{"type": "text", "content": "Be brief."}]),
            input__messages=json.dumps([text("user", "What is 2 + 2?")]),
            output__messages=json.dumps([{"role": "assistant", "parts": parts, "finish_reason": "stop"}]),
        ),
        "events": [
            {"name": "gen_ai.evaluation.result",
             "attributes": attributes(evaluation__name="user", evaluation__score__value=0.5,
                                      evaluation__explanation="too short")},
            {"name": "gen_ai.evaluation.result",
             "attributes": attributes(evaluation__name="edit", evaluation__explanation="It is 4.")},
        ],
    }  # fmt: skip
    path = tmp_path / "spans.json"
    path.write_text(json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}, indent=1).replace("\n", ""))
    (trace,) = read_traces(path).traces
    assert trace.feedback == Feedback(0.5, "It is 4.", "too short")
    assert trace.main.messages == (
        {"role": "system", "content": "Be brief."},
        USER,
        {**answer("4"), "reasoning_content": "Two and two."},
    )


def test_a_chat_span_without_content_names_the_setting(otlp: Path, tmp_path: Path) -> None:
    document = json.loads(otlp.read_text().splitlines()[0])
    for span in spans_of(document):
        removed = ("gen_ai.output.messages", "agentscope.function.input")
        span["attributes"] = [item for item in span["attributes"] if item["key"] not in removed]
    path = write(tmp_path / "spans.jsonl", document)
    with pytest.raises(TaskDataError, match=r"2 rows cannot be read:\n  line 1, span .*enable the recording"):
        read_traces(path)
    read = read_traces(path, skip_bad_rows=True)
    assert (read.traces, read.skipped) == ((), 2)


def test_chats_in_the_formats_of_openai(tmp_path: Path) -> None:
    completion = {"id": "c-1", "created": 7, "model": "m", "choices": [{"index": 0, "message": answer("4")}]}
    request = {"model": "m", "messages": [USER], "tools": [{"type": "function", "function": {"name": "f"}}]}
    path = write(
        tmp_path / "chats.jsonl",
        {"messages": [USER, answer("4")], "id": "a", "rating": "up"},
        {"request": request, "response": completion, "feedback": {"rating": 0.2, "edit": "four"}},
        {"custom_id": "batch", "body": request, "response": {"status_code": 200, "body": completion}},
        {"trace_id": "batch", "rating": False, "comment": "wrong"},
    )
    read = read_traces(path)
    assert (read.kind, read.skipped, read.unmatched) == ("chat_log", 0, 0)
    by_id = {trace.trace_id: trace for trace in read.traces}
    assert {name: trace.feedback for name, trace in by_id.items()} == {
        "a": Feedback(1.0),
        "c-1": Feedback(0.2, "four"),
        "batch": Feedback(0.0, comment="wrong"),
    }
    assert all(trace.main.messages == (USER, answer("4")) for trace in read.traces)
    assert len(by_id["c-1"].main.tools) == 1


def test_feedback_of_another_file_is_added(tmp_path: Path) -> None:
    chats = write(tmp_path / "chats.jsonl", {"messages": [USER, answer("5")], "id": "a", "rating": 1, "comment": "hm"})
    feedback = write(tmp_path / "feedback.jsonl", {"trace_id": "a", "rating": 0}, {"trace_id": "b", "rating": 1})
    read = read_traces(chats, feedback)
    assert read.traces[0].feedback == Feedback(0.0, comment="hm")
    assert read.unmatched == 1


def test_calls_with_one_trace_id_are_one_trace(tmp_path: Path) -> None:
    turns = [USER, answer("4"), {"role": "user", "content": "And 3 + 3?"}, answer("6")]
    other = [{"role": "user", "content": "Summarise."}, answer("Sums.")]
    path = write(tmp_path / "c.jsonl", *({"trace_id": "t", "messages": m} for m in (turns[:2], other, turns)))
    (trace,) = read_traces(path).traces
    assert [list(part.messages) for part in trace.conversations] == [other, turns]
    assert trace.question == "And 3 + 3?"


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("{", "not JSON"),
        ([1], "is of type list; expected an object"),
        ({"messages": []}, "messages is \\[\\]; expected a list of chat messages"),
        ({"messages": [{"content": "a"}]}, "expected an object with role and content"),
        ({"messages": [USER]}, "the last message is not an answer"),
        ({"messages": [USER, answer("4")], "rating": "great"}, "rating is 'great'; expected a number, or one of up"),
        ({"messages": [USER, answer("4")], "rating": float("nan")}, "rating is nan"),
        ({"messages": [USER, answer("4")], "edit": 4}, "edit is 4; expected a text"),
        ({"messages": [USER], "response": {"choices": []}}, "not exactly one choice"),
        ({"a": 1}, "neither a chat"),
        ({"trace_id": "a"}, "feedback without rating"),
    ],
)  # fmt: skip
def test_bad_rows_are_named(tmp_path: Path, row: Any, problem: str) -> None:
    path = write(tmp_path / "chats.jsonl", {"messages": [USER, answer("4")], "id": "a"}, row)
    with pytest.raises(TaskDataError, match=rf"1 rows cannot be read:\n  line 2: .*{problem}"):
        read_traces(path)
    read = read_traces(path, skip_bad_rows=True)
    assert ([trace.trace_id for trace in read.traces], read.skipped) == (["a"], 1)


def test_a_missing_source(tmp_path: Path) -> None:
    with pytest.raises(TaskDataError, match="neither a file nor the folder of a run"):
        read_traces(tmp_path)
