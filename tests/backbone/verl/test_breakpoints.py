"""`--db` in episodes that run in workers, over the protocol that editors speak with debugpy."""

from __future__ import annotations

from pathlib import Path

import pytest

from astuner.ports import free_port
from astuner.run_record import read_summary
from tests.backbone.runs import PATIENCE, Run
from tests.backbone.verl.runs import AGENTS, make_job
from tests.launcher.debug_client import DebugClient, stopped_at

pytestmark = [pytest.mark.verl, pytest.mark.slow]


def test_an_episode_in_a_worker_stops_until_the_debugger_leaves(model_folder: Path, tmp_path: Path):
    port = free_port()
    line = AGENTS.read_text().splitlines().index('        bp("HERE")') + 2
    job = make_job("StopsAtATag", model_folder, tmp_path, trainer_common__total_training_steps=1)
    words = (f"astuner.debug.debugger_port={port}", "astuner.rollout.max_env_worker=1")
    run = Run(job, tmp_path, "--db=HERE|NOWHERE", *words)
    run.wait_until_said(f"attach one to 127.0.0.1:{port}")
    client = DebugClient(port, PATIENCE)
    try:
        client.attach(AGENTS)
        # In the first of eight episodes, and in the second.
        stops = [stopped_at(client, "said", main=False) for _ in range(2)]
        # In the third: debugpy lets a thread stand for ever that stops in the very moment in which its client leaves.
        client.event("stopped")
        client.ask("disconnect")
    finally:
        client.close()
    code, printed = run.ended()
    assert code == 0, printed
    assert [place[:2] for place in stops] == [("execute", line)] * 2
    assert all(len(said) > 2 for _, _, said in stops)
    assert "no line bp('NOWHERE') was reached; reached were: HERE" in printed
    assert read_summary(run.record).episodes.ok == 8
    assert run.leftovers() == []
