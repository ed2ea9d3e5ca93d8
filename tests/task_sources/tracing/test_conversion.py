"""Conversion of traces to tasks, transcripts and preference pairs, redaction, and the commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from astuner.cli.main import astuner
from astuner.config.task_sources import FeedbackTracingConfig
from astuner.errors import TaskDataError
from astuner.task_sources.tracing.convert import convert, import_traces
from astuner.task_sources.tracing.trace import Feedback, Trace, TracedConversation

TOOLS = ({"type": "function", "function": {"name": "f"}},)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def trace(name: str, *messages: dict[str, Any], rating: float | None = None, edit: str = "", **fields: Any) -> Trace:
    tools = fields.pop("tools", ())
    return Trace(name, (TracedConversation(messages, tools),), Feedback(rating, edit), **fields)


def test_traces_become_tasks() -> None:
    system = {"role": "system", "content": "Be brief."}
    traces = [
        trace("a", system, user("q1"), answer("a1"), rating=1),
        trace("b", system, user("q1"), answer("a1"), user("q2"), answer("a2"), rating=0, edit="better"),
        trace("c", user("q3"), answer("a3"), rating=0),
        trace("d", user("q4"), answer("a4")),
        trace("e", answer("hello"), rating=1),
        trace("f", user("q6"), answer("a6"), rating=1, metadata={"answer": "reference", "task_id": "9"}),
    ]
    conversion = convert(traces, "tasks", min_rating=0.5)
    assert conversion.rows == (
        {"task_id": "a", "main_query": "q1", "answer": "a1", "rating": 1},
        {
            "task_id": "b",
            "main_query": "q2",
            "init_messages": [user("q1"), answer("a1")],
            "answer": "better",
            "rating": 0,
        },
        {"task_id": "f", "main_query": "q6", "answer": "reference", "rating": 1},
    )
    assert conversion.left_out == {"rated below 0.5": 1, "without a rating": 1, "without a message of the user": 1}
    assert len(convert(traces, "tasks").rows) == 5


def test_transcripts_train_each_accepted_answer_once() -> None:
    first, second = (user("q1"), answer("a1")), (user("q2"), answer("a2"))
    traces = [
        trace("turn 1", *first, rating=1),
        trace("turn 2", *first, *second, rating=1),
        trace("edited", user("q3"), answer("bad"), rating=0, edit="good"),
        trace("after edited", user("q3"), answer("bad"), user("q4"), answer("a4"), rating=1),
        trace("bad", user("q5"), answer("a5"), rating=0),
        trace("after bad", user("q5"), answer("a5"), user("q6"), answer("a6"), rating=1),
        trace("tools", user("q7"), {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}, rating=1),
        trace("known", user("q8"), {"role": "assistant", "content": "", "tool_calls": []}, rating=1, tools=TOOLS),
    ]
    conversion = convert(traces, "sft", min_rating=1)
    assert conversion.rows == (
        {"task_id": "turn 2", "messages": [*first, *second]},
        {"task_id": "edited", "messages": [user("q3"), answer("good")]},
        {"task_id": "after edited", "messages": [user("q3"), {**answer("bad"), "weight": 0}, user("q4"), answer("a4")]},
        {"task_id": "after bad", "messages": [user("q5"), {**answer("a5"), "weight": 0}, user("q6"), answer("a6")]},
        {"task_id": "known", "messages": list(traces[-1].main.messages), "tools": list(TOOLS)},
    )
    assert conversion.left_out == {
        "rated below 1": 1,
        "with tool calls, but without the definitions of the tools": 1,
        "that a later turn contains": 1,
    }


def test_preference_pairs() -> None:
    prompt = user("q")
    traces = [
        trace("middle", prompt, answer("ok"), rating=3),
        trace("best", prompt, answer("great"), rating=5),
        trace("worst", prompt, answer("no"), rating=1),
        trace("same text", prompt, answer("no"), rating=1),
        trace("as good", prompt, answer("fine"), rating=5),
        trace("other tools", prompt, answer("no"), rating=1, tools=TOOLS),
        trace("edited", user("r"), answer("draft"), edit="final", tools=TOOLS),
    ]
    conversion = convert(traces, "preferences")
    assert conversion.rows == (
        {"prompt": [user("r")], "chosen": [answer("final")], "rejected": [answer("draft")], "tools": list(TOOLS)},
        {"prompt": [prompt], "chosen": [answer("great")], "rejected": [answer("ok")]},
        {"prompt": [prompt], "chosen": [answer("great")], "rejected": [answer("no")]},
    )
    assert sum(conversion.left_out.values()) == 3


REDACT = """
def names(text):
    return text.replace("Ada", "PERSON")


def fails(text):
    raise ValueError(text)


def counts(text):
    return len(text)
"""
KEY = "sk-" + "canary4Zb81kQpXw7Lr2Tn5Vy9" * 2


@pytest.fixture
def chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_redaction.py").write_text(REDACT)
    path = tmp_path / "chats.jsonl"
    rows = [
        {
            "id": str(number),
            "messages": [user(f"Ada asks {number}"), answer(f"Ada: {number} {KEY}")],
            "rating": number % 2,
            "edit": "Ada" if number == 3 else None,
        }
        for number in range(10)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_redaction_covers_every_text_and_is_off_by_default(chats: Path) -> None:
    def imported(**fields: Any) -> str:
        config = FeedbackTracingConfig(base_url=str(chats), train_output_path="out.jsonl", **fields)
        import_traces(config, "tasks", base_dir=chats.parent, search=[chats.parent])
        return Path("out.jsonl").read_text()

    plain = imported(validation_share=0.0)
    assert "Ada asks 3" in plain
    assert KEY not in plain
    assert "[redacted]" in plain
    redacted = imported(validation_share=0.0, redact="my_redaction->names")
    assert "Ada" not in redacted
    assert redacted.count("PERSON") == plain.count("Ada")
    with pytest.raises(
        TaskDataError, match=r"fails, called with a text of trace '0', raised ValueError \(at"
    ) as caught:
        imported(redact="my_redaction->fails")
    assert "Ada" not in str(caught.value)
    with pytest.raises(TaskDataError, match="returned an object of type int; expected a text"):
        imported(redact="my_redaction->counts")


def run(*arguments: object) -> None:
    assert astuner.main([str(argument) for argument in arguments], standalone_mode=False) in (None, 0)


def test_the_commands_show_and_import_traces(chats: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("trace", "show", chats)
    output = capsys.readouterr().out
    assert "3  rating 1 edited  Ada asks 3 → Ada: 3" in output
    assert output.splitlines()[-1] == "10 traces (chat_log), 10 rated, 1 edited, 0 bad rows"
    run("trace", "show", chats, "--json", "4")
    (conversation,) = json.loads(capsys.readouterr().out)["conversations"]
    assert conversation["messages"][0] == user("Ada asks 4")
    run("trace", "show", chats, "3")
    assert "edit: Ada" in capsys.readouterr().out
    split = ("--validation-out", "val.jsonl", "--validation-share", 0.2)
    run("trace", "import", chats, "--to", "sft", "--out", "sft.jsonl", "--min-rating", 1, *split)
    assert capsys.readouterr().out.splitlines() == [
        "wrote 4 rows to sft.jsonl",
        "wrote 1 rows to val.jsonl",
        "left out 5 tasks (5 rated below 1)",
    ]
    rows = [json.loads(line) for name in ("sft.jsonl", "val.jsonl") for line in Path(name).read_text().splitlines()]
    assert sorted(row["task_id"] for row in rows) == ["1", "3", "5", "7", "9"]


def test_an_import_without_rows_is_an_error(chats: Path) -> None:
    rows = [json.loads(line) for line in chats.read_text().splitlines()]
    chats.write_text("".join(json.dumps({**row, "edit": None}) + "\n" for row in rows))
    config = FeedbackTracingConfig(base_url=str(chats), min_rating=2, train_output_path="out.jsonl")
    with pytest.raises(TaskDataError, match=r"10 traces can be used: left out 10 tasks \(10 rated below 2\)"):
        import_traces(config, "tasks", base_dir=chats.parent, search=())
