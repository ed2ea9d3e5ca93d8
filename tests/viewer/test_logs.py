"""The API of logs, tracebacks and notes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from astuner.run_record.recorded_run import RecordedRun, RunNote
from astuner.system.redaction.redactor import learn_secrets
from astuner.viewer import logs
from tests.viewer.conftest import client
from tests.viewer.records import an_episode, open_record


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with logs, a failed episode, and a link to a file outside of the run."""
    failed: dict[str, Any] = {"status": "failed", "reward": None, "is_success": None, "error_kind": "run"}
    with open_record(tmp_path / "runs/run") as record:
        for number in range(3):
            trace = f"Traceback\n  line {number}\nValueError: port {number}"
            episode = an_episode(f"e{number}", "t", 0, (), error=f"port {number}", error_traceback=trace, **failed)
            record.write_episode(1, "train", episode, None)
    folder = tmp_path / "runs/run"
    (folder / "services").mkdir()
    (folder / "services/tools.log").write_bytes(b"10%\r50%\r100%\n\x1b[31mred\x1b[0m \xff\n")
    (tmp_path / "secret.log").write_text("outside")
    os.symlink(tmp_path / "secret.log", folder / "services/link.log")
    (folder / "run.log").write_text("".join(f"line {number:06d} of the log\n" for number in range(20_000)))
    return folder


def test_a_log_is_read_from_its_end_in_pieces(run: Path):
    size = (run / "run.log").stat().st_size
    text, end = "", None
    pieces = 0
    while end != 0:
        piece = logs.read_piece(run, "run.log", before=end)
        assert len(piece["text"]) <= logs._PIECE
        text, end = piece["text"] + text, piece["start"]
        pieces += 1
    assert text == (run / "run.log").read_text()
    assert pieces > 5
    with (run / "run.log").open("a") as file:
        file.write("a new line\nhalf a li")
    assert logs.read_piece(run, "run.log", after=size)["text"] == "a new line\n"
    assert logs.read_piece(run, "run.log", after=2**50)["text"] == ""


def test_a_line_longer_than_a_piece_is_read_in_pieces(run: Path):
    (run / "run.log").write_text("first\n" + "x" * 200_000 + "\n")
    shown, end = "", None
    while end != 0:
        piece = logs.read_piece(run, "run.log", before=end)
        assert piece["start"] < piece["end"]
        shown, end = piece["text"] + shown, piece["start"]
    assert shown == (run / "run.log").read_text()


def test_a_search_with_many_matches_continues_where_it_stopped(run: Path):
    lines, before = [], None
    while before != 0:
        found = logs.search_log(run, "run.log", "of the log", before)
        assert len(found["matches"]) <= logs._MAX_MATCHES
        lines += [match["line"] for match in found["matches"]]
        before = found["searched"] if lines[-1] != "line 000000 of the log" else 0
        if len(lines) >= 1000:
            break
    assert lines == [f"line {number:06d} of the log" for number in range(19_999, 19_999 - len(lines), -1)]


def test_a_search_goes_towards_the_beginning_in_bounded_pieces(run: Path, monkeypatch: Any):
    found = logs.search_log(run, "run.log", "LINE 00001")
    assert [match["line"] for match in found["matches"]] == [f"line 00001{n} of the log" for n in range(9, -1, -1)]
    data = (run / "run.log").read_bytes()
    assert all(data[match["start"] :].startswith(match["line"].encode()) for match in found["matches"])
    monkeypatch.setattr(logs, "_SEARCHED", 100_000)
    found, reads = logs.search_log(run, "run.log", "line 000019"), 0
    while found["searched"] > 0:
        assert found["matches"] == []
        found = logs.search_log(run, "run.log", "line 000019", found["searched"])
        reads += 1
    assert len(found["matches"]) == 1
    assert reads >= 4


def test_logs_of_the_run_only(run: Path):
    with client(run.parent, run.parent) as session:
        assert [file["name"] for file in session.get("/api/logs?run=run").json()["files"]] == [
            "run.log", "services/tools.log",
        ]  # fmt: skip
        for name in ("services/link.log", "../../secret.log", "/etc/passwd", "config.yaml", "", "\0", "episodes"):
            for path in ("log", "log_search"):
                response = session.get(f"/api/{path}", params={"run": "run", "file": name, "text": "a"})
                assert response.status_code == 404, name
                assert "outside" not in response.text.replace("outside the", "")
        shown = session.get("/api/log?run=run&file=services/tools.log").json()["text"]
        assert shown == "100%\nred \N{REPLACEMENT CHARACTER}\n"
        assert session.get("/api/log?run=run&file=run.log&before=-1").status_code == 422
        found = session.get("/api/tracebacks?run=run").json()
        assert [(row["episodes"], row["traceback"]) for row in found] == [
            (3, "Traceback\n  line 2\nValueError: port 2")
        ]


def test_secrets_in_logs_of_other_programs_are_redacted(run: Path):
    learn_secrets({"OF_A_TEST_API_KEY": "s3cr3t-of-the-logs-page"})
    (run / "services/tools.log").write_text("key s3cr3t-of-the-logs-page used\n")
    assert "s3cr3t" not in logs.read_piece(run, "services/tools.log")["text"]
    assert "s3cr3t" not in logs.search_log(run, "services/tools.log", "used")["matches"][0]["line"]


def test_notes_and_tags_are_written(run: Path):
    with client(run.parent, run.parent) as session:
        origin = {"origin": "http://127.0.0.1:1234"}
        form = {"text": " a note \n", "tags": ["kept", "kept", "x"]}
        assert session.post("/api/note?run=run", json=form, headers=origin).json() == {
            "text": "a note", "tags": ["kept", "x"],
        }  # fmt: skip
        assert RecordedRun(run).note == RunNote(text="a note", tags=("kept", "x"))
        (row,) = session.get("/api/runs").json()
        assert (row["note"], row["tags"]) == ("a note", ["kept", "x"])
        assert session.post("/api/note?run=other", json=form, headers=origin).status_code == 404


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"content-type": "text/plain"}, None, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, None, 415),
        ({"content-type": "multipart/form-data"}, None, 415),
        ({"content-type": ""}, None, 415),
        ({"origin": ""}, None, 403),
        ({"origin": "null"}, None, 403),
        ({"origin": "http://evil.example"}, None, 403),
        ({"origin": "http://localhost:1234"}, None, 403),
        ({"host": "evil.example"}, None, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"}, None, 403),
        ({}, "{", 422),
        ({}, '{"text": "a"}', 422),
        ({}, '{"text": 1, "tags": []}', 422),
        ({}, '{"text": "a", "tags": [""]}', 422),
        ({}, '{"text": "a", "tags": [], "folder": "/"}', 422),
        ({}, json.dumps({"text": "a" * 100_000, "tags": []}), 413),
        ({}, None, 200),
        ({"content-type": "application/json; charset=utf-8"}, None, 200),
    ],
)
def test_only_the_page_itself_may_write(run: Path, headers: dict[str, str], body: str | None, status: int):
    usual = {"content-type": "application/json", "origin": "http://127.0.0.1:1234"}
    sent = {name: value for name, value in {**usual, **headers}.items() if value}
    with client(run.parent, run.parent) as session:
        content = body if body is not None else '{"text": "a note", "tags": []}'
        assert session.post("/api/note?run=run", content=content, headers=sent).status_code == status
    assert RecordedRun(run).note.text == ("a note" if status == 200 else "")


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "POST"])
def test_all_other_requests_are_read_only(run: Path, method: str):
    headers = {"content-type": "application/json", "origin": "http://127.0.0.1:1234"}
    with client(run.parent, run.parent) as session:
        for path in ("/api/runs", "/api/episodes", "/", "/api/note/", *(["/api/note"] if method != "POST" else [])):
            response = session.request(method, f"{path}?run=run", headers=headers, content="{}")
            assert response.status_code == 405
            assert "access-control-allow-origin" not in response.headers
