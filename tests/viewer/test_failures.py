"""Failed episodes in groups of one error message."""

from __future__ import annotations

from pathlib import Path

import pytest

from astuner.errors import without_variable_parts
from tests.viewer.conftest import client
from tests.viewer.records import an_episode, open_record


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("timeout after 30.0 s", "timeout after 7 s"),
        ("cannot connect to http://127.0.0.1:8123/v1", "cannot connect to http://127.0.0.1:40011/v1"),
        ("<Tool object at 0x7f3a2b91> is closed", "<Tool object at 0x55d0> is closed"),
        ("KeyError: 'q12'", "KeyError: 'q7'"),
        ("no file /tmp/run-3/a.json", "no file /tmp/run-99/b.json"),
        ("episode deadbeefdeadbeef hung", "episode cafecafecafecafe hung"),
        ("expected [1, 2, 3] tokens", "expected [4] tokens"),
    ],
)
def test_numbers_ids_and_addresses_do_not_split_a_group(first: str, second: str):
    assert without_variable_parts(first) == without_variable_parts(second)


def test_words_split_a_group():
    assert without_variable_parts("the tool was closed") != without_variable_parts("the judge was closed")


def test_failed_episodes_are_grouped_and_each_group_is_a_filter(tmp_path: Path):
    messages = ["port 1 refused", "port 22 refused", "port 3 refused", "the judge has no model", "port 4 refused"]
    with open_record(tmp_path / "run") as record:
        for number, message in enumerate(messages):
            failed = {"status": "failed", "reward": None, "is_success": None, "error_kind": "run", "error": message}
            # An episode that was cut has a kind of error and did not fail.
            values = failed if number < 4 else {"error_kind": "max_steps", "error": message}
            record.write_episode(number, "train", an_episode(f"e{number}", f"t{number}", 0, (), **values), None)
    with client(tmp_path, tmp_path) as session:
        about = session.get("/api/run?run=run").json()
        assert about["counts"]["failed"] == about["failures"]["episodes"] == 4
        largest, other = about["failures"]["groups"]
        assert (largest["episodes"], largest["messages"], largest["tasks"]) == (3, 3, 3)
        assert (largest["first_step"], largest["last_step"], largest["error"]) == (0, 2, "port 3 refused")
        assert (other["episodes"], other["kind"]) == (1, "run")
        rows = session.get("/api/episodes", params={"run": "run", "failure": largest["key"]}).json()["rows"]
        assert [row["episode"] for row in rows] == ["e2", "e1", "e0"]
        assert session.get("/api/runs").json()[0]["counts"]["failed"] == 4
