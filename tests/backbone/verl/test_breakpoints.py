"""`--db` in episodes that run in Ray workers, over the debug adapter protocol of debugpy."""

from __future__ import annotations

from pathlib import Path

import pytest

from astuner.run_record import read_summary
from astuner.system.localhost import free_port
from tests.backbone.runs import PATIENCE, Run
from tests.backbone.verl.runs import AGENTS, make_job
from tests.launcher.debug_client import DebugClient, stopped_at

pytestmark = [pytest.mark.verl, pytest.mark.slow]


def test_an_episode_in_a_worker_stops_until_the_debugger_disconnects(model_folder: Path, tmp_path: Path):
    port = free_port()
    line = AGENTS.read_text().splitlines().index('        bp("HERE")') + 2
    job = make_job("HasABreakpoint", model_folder, tmp_path, trainer_common__total_training_steps=1)
    words = (f"astuner.debug.debugger_port={port}", "astuner.rollout.max_env_worker=1")
    run = Run(job, tmp_path, "--db=HERE|NOWHERE", *words)
    run.wait_for_output(f"attach one to 127.0.0.1:{port}")
    client = DebugClient(port, PATIENCE)
    try:
        client.attach(AGENTS)
        # In the first of eight episodes, and in the second.
        stops = [stopped_at(client, "text") for _ in range(2)]
        # In the third: debugpy blocks a thread forever if it stops while its client disconnects.
        client.event("stopped")
        client.ask("disconnect")
    finally:
        client.close()
    code, printed = run.ended()
    assert code == 0, printed
    assert [stop[:2] for stop in stops] == [("execute", line)] * 2
    assert all(len(text) > 2 for _, _, text in stops)
    assert "no line bp('NOWHERE') was reached; reached were: HERE" in printed
    assert read_summary(run.record).episodes.ok == 8
    assert run.leftovers() == []
