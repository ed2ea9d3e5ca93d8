"""A breakpoint in a user's workflow, set and hit over the protocol that editors speak with debugpy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from astuner.run_record import read_summary
from tests.launcher.debug_client import DebugClient
from tests.llm_engine.completions_server import listening

SECONDS = 60.0


def test_a_breakpoint_in_a_workflow_stops_shows_its_variables_and_goes_on(folder: Path):
    with listening() as place:
        port = place.getsockname()[1]
    command = [sys.executable, "-Xfrozen_modules=off", "-m", "debugpy", "--listen", f"127.0.0.1:{port}"]
    command += ["--wait-for-client", "-m", "astuner", "--backbone", "debug", "--conf", "run.yaml"]
    command += ["astuner.debug.debug_max_parallel=1", "astuner.debug.debug_first_n_tasks=1"]
    command += ["astuner.rollout.num_repeat=2", "astuner.rollout.agentscope_workflow=agents->StopsAtTags"]
    source = folder / "agents.py"
    line = next(n for n, text in enumerate(source.read_text().splitlines(), 1) if 'bp("NOT_ASKED_FOR")' in text)
    with (folder / "out.txt").open("w") as out:
        process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=out)
    client = DebugClient(port, SECONDS)
    try:
        client.ask("initialize", adapterID="test", pathFormat="path", linesStartAt1=True)
        attached = client.send("attach", justMyCode=True)
        client.event("initialized")
        set_there = client.ask("setBreakpoints", source={"path": str(source)}, breakpoints=[{"line": line}])
        assert [found["line"] for found in set_there["breakpoints"]] == [line]
        client.ask("configurationDone")
        client.answer(attached)
        for repeat in range(2):
            stopped = client.event("stopped")
            assert stopped["reason"] == "breakpoint"
            threads = {thread["id"]: thread["name"] for thread in client.ask("threads")["threads"]}
            assert threads[stopped["threadId"]] == "MainThread"
            frame = client.ask("stackTrace", threadId=stopped["threadId"], levels=1)["stackFrames"][0]
            assert (frame["name"], frame["line"]) == ("execute", line)
            (locals_,) = [s for s in client.ask("scopes", frameId=frame["id"])["scopes"] if s["name"] == "Locals"]
            variables = client.ask("variables", variablesReference=locals_["variablesReference"])["variables"]
            assert {v["name"]: v["value"] for v in variables}["answer"] == str(42 + repeat)
            client.ask("continue", threadId=stopped["threadId"])
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
