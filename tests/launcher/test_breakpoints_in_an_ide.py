"""A breakpoint in a user's workflow, set and hit with the protocol between editors and debugpy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from astuner.run_record import read_summary
from astuner.system.localhost import free_port
from tests.launcher.debug_client import DebugClient, client_of, line_of, stopped_at

WORKFLOW = "astuner.rollout.agentscope_workflow=agents->{}"


@contextmanager
def attached(folder: Path, *words: str, lines: Sequence[int] = ()) -> Iterator[DebugClient]:
    """Run the debug backbone twice on one task, under debugpy with breakpoints in agents.py. It must succeed."""
    port = free_port()
    command = ["-m", "debugpy", "--listen", f"127.0.0.1:{port}", "--wait-for-client"]
    command += ["-m", "astuner", "--backbone", "debug", "--conf", "run.yaml"]
    command += ["astuner.debug.debug_max_parallel=1", "astuner.debug.debug_first_n_tasks=1"]
    with client_of(folder / "agents.py", [*command, "astuner.rollout.num_repeat=2", *words], port, lines) as client:
        yield client
        client.event("terminated")
    assert read_summary(folder / "launcher_record/run-debug").episodes.ok == 2


def test_the_editors_and_named_breakpoints_in_a_workflow_stop_and_show_variables(folder: Path):
    line = line_of(folder / "agents.py", 'bp("NOT_ASKED_FOR")')
    named = line_of(folder / "agents.py", 'bp("HERE")') + 1  # the user's line, not one of `bp`
    with attached(folder, "--db=HERE", WORKFLOW.format("StopsAtTags"), lines=[line]) as client:
        stops = [stopped_at(client, "answer") for _ in range(4)]
    assert stops == [("execute", place, answer) for answer in ("42", "43") for place in (line, named)]


def test_a_breakpoint_in_a_plain_judge_is_in_the_main_thread(folder: Path):
    line = line_of(folder / "agents.py", "return asyncio.run(")
    words = (WORKFLOW.format("Unscored"), "astuner.task_judge.judge_protocol=agents->StopsAtATag")
    with attached(folder, *words, lines=[line]) as client:
        stops = [stopped_at(client, "repeat") for _ in range(2)]
    assert stops == [("compute_reward", line, "0.0"), ("compute_reward", line, "1.0")]


def test_training_stops_on_the_debugger_port_until_the_debugger_detaches(folder: Path):
    port, line = free_port(), line_of(folder / "agents.py", 'bp("HERE")') + 1
    command = ["-m", "astuner", "--conf", "run.yaml", "--db=HERE", WORKFLOW.format("StopsAtTags")]
    command += [f"astuner.debug.debugger_port={port}", "astuner.trainer_common.total_training_steps=1"]
    # One at a time, so that the order is deterministic; a stop in one thread stops all threads.
    with client_of(folder / "agents.py", [*command, "astuner.rollout.max_env_worker=1"], port) as client:
        # The first of the eight training episodes. The debugger detaches in the fourth; the others run without it.
        stops = [stopped_at(client, "answer") for _ in range(3)]
        client.event("stopped")
        client.ask("disconnect")
    assert [place[:2] for place in stops] == [("execute", line)] * 3
    assert stops[0][2] == "42"
    assert f"attach one to 127.0.0.1:{port}" in (folder / "out.txt").read_text()
    assert read_summary(folder / "launcher_record/run").episodes.ok == 8
