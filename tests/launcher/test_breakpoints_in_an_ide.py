"""A breakpoint in a user's workflow, set and hit over the protocol that editors speak with debugpy."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from astuner.run_record import read_summary
from tests.launcher.debug_client import DebugClient
from tests.llm_engine.completions_server import listening

SECONDS = 60.0
WORKFLOW = "astuner.rollout.agentscope_workflow=agents->{}"


@contextmanager
def attached(folder: Path, *words: str, lines: Sequence[int] = ()) -> Iterator[DebugClient]:
    """Run the debug backbone on one task, twice, under debugpy with breakpoints in agents.py; it has to end well."""
    with listening() as place:
        port = place.getsockname()[1]
    command = [sys.executable, "-Xfrozen_modules=off", "-m", "debugpy", "--listen", f"127.0.0.1:{port}"]
    command += ["--wait-for-client", "-m", "astuner", "--backbone", "debug", "--conf", "run.yaml"]
    command += ["astuner.debug.debug_max_parallel=1", "astuner.debug.debug_first_n_tasks=1"]
    command += ["astuner.rollout.num_repeat=2", *words]
    with (folder / "out.txt").open("w") as out:
        process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=out)
    client = DebugClient(port, SECONDS)
    try:
        client.ask("initialize", adapterID="test", pathFormat="path", linesStartAt1=True)
        attaching = client.send("attach", justMyCode=True)
        client.event("initialized")
        places = [{"line": line} for line in lines]
        set_there = client.ask("setBreakpoints", source={"path": str(folder / "agents.py")}, breakpoints=places)
        assert [found["line"] for found in set_there["breakpoints"]] == list(lines)
        client.ask("configurationDone")
        client.answer(attaching)
        yield client
        client.event("terminated")
    finally:
        client.close()
        try:
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
    assert code == 0, (folder / "out.txt").read_text()
    assert read_summary(folder / "launcher_record/run-debug").episodes.ok == 2


def line_of(folder: Path, text: str) -> int:
    """The number of the first line of agents.py with a text in it."""
    return next(n for n, line in enumerate((folder / "agents.py").read_text().splitlines(), 1) if text in line)


def stopped_at(client: DebugClient, name: str) -> tuple[str, int, str]:
    """Wait for a stop in the main thread, and go on: the function, the line and a variable's value."""
    stopped = client.event("stopped")
    threads = {thread["id"]: thread["name"] for thread in client.ask("threads")["threads"]}
    assert threads[stopped["threadId"]] == "MainThread"
    frame = client.ask("stackTrace", threadId=stopped["threadId"], levels=1)["stackFrames"][0]
    (locals_,) = [s for s in client.ask("scopes", frameId=frame["id"])["scopes"] if s["name"] == "Locals"]
    variables = client.ask("variables", variablesReference=locals_["variablesReference"])["variables"]
    client.ask("continue", threadId=stopped["threadId"])
    return frame["name"], frame["line"], next(v["value"] for v in variables if v["name"] == name)


def test_a_breakpoint_in_a_workflow_stops_shows_its_variables_and_goes_on(folder: Path):
    line = line_of(folder, 'bp("NOT_ASKED_FOR")')
    with attached(folder, WORKFLOW.format("StopsAtTags"), lines=[line]) as client:
        assert [stopped_at(client, "answer") for _ in range(2)] == [("execute", line, "42"), ("execute", line, "43")]


def test_a_named_breakpoint_stops_at_the_users_line(folder: Path):
    line = line_of(folder, 'bp("HERE")') + 1
    with attached(folder, "--db=HERE", WORKFLOW.format("StopsAtTags")) as client:
        assert [stopped_at(client, "answer") for _ in range(2)] == [("execute", line, "42"), ("execute", line, "43")]


def test_a_breakpoint_in_a_plain_judge_is_in_the_main_thread(folder: Path):
    line = line_of(folder, "return asyncio.run(")
    words = (WORKFLOW.format("Unscored"), "astuner.task_judge.judge_protocol=agents->StopsAtATag")
    with attached(folder, *words, lines=[line]) as client:
        stops = [stopped_at(client, "repeat") for _ in range(2)]
    assert stops == [("compute_reward", line, "0.0"), ("compute_reward", line, "1.0")]
