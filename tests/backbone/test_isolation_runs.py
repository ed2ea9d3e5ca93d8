"""Worker processes of whole runs: their results can be repeated, and they end with the run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from astuner import AstunerJob
from astuner.backbone.episode_workers.fork_server import SERVER_NAME
from astuner.run_record import read_episode, read_index
from astuner.schema import Episode
from tests.backbone.runs import Run
from tests.launcher.liveness import running_after

AGENTS = Path(__file__).with_name("isolation_agents.py")
LETTERS = Path(__file__).parent / "local" / "agents.py"
SECRET = "sk-secret-of-the-test-0123456789"


def make_job(model: Path, folder: Path, workflow: str, *questions: str, **settings: Any) -> AstunerJob:
    folder.mkdir(exist_ok=True)
    rows = [{"question": question, "answer": ""} for question in questions]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values: dict[str, Any] = {
        "experiment_name": "run",
        "backbone": "local",
        "model__renderer": "qwen3",
        "data__train_batch_size": len(questions),
        "debug__debug_first_n_tasks": len(questions),
        "rollout__num_repeat": 2,
        "rollout__temperature": 1.0,
        "rollout__max_env_worker": 2,
        "rollout__max_response_length_in_one_turn": 6,
        "rollout__max_model_len": 256,
        "rollout__compute_madness_checklist": [],
        "trainer_common__total_training_steps": 2,
        "trainer_common__val_before_train": False,
        "trainer_common__optim__lr": 1e-2,
        "trainer_common__device": "cpu",
    }
    job = AstunerJob(algorithm="grpo", model=model, **(values | settings))
    return job.set_workflow(workflow).set_data("file", folder / "train.jsonl")


def episodes_of(record: Path) -> list[Episode]:
    """Return the episodes, without times, sorted by id."""
    episodes = []
    for entry in read_index(record):
        episode = read_episode(record / entry.path)
        calls = tuple(replace(call, start_time=0.0, end_time=0.0) for call in episode.calls)
        episodes.append(replace(episode, calls=calls, start_time=0.0, end_time=0.0))
    return sorted(episodes, key=lambda episode: episode.episode_id)


def test_a_training_with_one_worker_can_be_repeated(model_folder: Path, tmp_path: Path):
    records = []
    for name in ("first", "second"):
        # One episode at a time: the batches of the engine, on which rounding depends, are the same.
        questions = ("question 0", "question 1", "question 2")
        job = make_job(model_folder, tmp_path / name, f"{LETTERS}->Letters", *questions, rollout__max_env_worker=1)
        run = Run(job, tmp_path / name)
        code, output = run.ended()
        assert code == 0, output
        records.append(run.record)
    episodes = [episodes_of(record) for record in records]
    assert len(episodes[0]) == 12
    assert all(episode.samples for episode in episodes[0])
    assert episodes[0] == episodes[1]
    weights = [(record / "model" / "model.safetensors").read_bytes() for record in records]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_the_run(model_folder: Path, tmp_path: Path, number: signal.Signals):
    """They do while they sleep, while C code blocks them, and with the processes that they have started."""
    settings = {"rollout__max_env_worker": 4}
    run = Run(make_job(model_folder, tmp_path, f"{AGENTS}->StartsProcess", "block", "sleep", **settings), tmp_path)
    until = time.monotonic() + 300
    while len(list((tmp_path / "shared").iterdir())) < 4:
        assert run.process.poll() is None, run.log.read_text()
        assert time.monotonic() < until
        time.sleep(0.1)
    descendants = psutil.Process(run.process.pid).children(recursive=True)
    started = [psutil.Process(int(file.stem)) for file in (tmp_path / "shared").iterdir()]
    assert len([process for process in descendants if process.name().startswith("astuner-")]) == 5
    run.process.send_signal(number)
    code, output = run.ended()
    assert code != 0, output
    running = running_after({*descendants, *started}, 60)
    try:
        assert not running
    finally:
        for process in running:
            with contextlib.suppress(psutil.Error):
                process.kill()


def test_an_interrupt_while_the_first_worker_starts(model_folder: Path, tmp_path: Path):
    run = Run(make_job(model_folder, tmp_path, f"{LETTERS}->Letters", "good"), tmp_path)
    until = time.monotonic() + 300
    servers: list[psutil.Process] = []
    while not servers:
        assert run.process.poll() is None, run.log.read_text()
        assert time.monotonic() < until
        children = psutil.Process(run.process.pid).children()
        with contextlib.suppress(psutil.Error):  # another child has ended meanwhile
            servers = [child for child in children if child.name() == SERVER_NAME]
    run.process.send_signal(signal.SIGTERM)
    _, output = run.ended()
    assert "interrupted" in output
    assert "exception" not in output.lower()
    assert not running_after(servers, 10)


def test_a_debug_run_records_crashes_and_redacts_secrets(model_folder: Path, tmp_path: Path):
    questions = ("secret", "good")
    job = make_job(model_folder, tmp_path, f"{AGENTS}->Raises", *questions, backbone="debug")
    job.set_judge(f"{AGENTS}->HarmfulJudge")
    run = Run(job, tmp_path, MY_API_KEY=SECRET)
    code, output = run.ended()
    assert code == 0, output
    record = tmp_path / "records" / "run-debug"
    assert {episode.task.main_query: episode.status for episode in episodes_of(record)} == {
        "secret": "failed",
        "good": "ok",
    }
    texts = [output, *(file.read_text(errors="replace") for file in record.rglob("*") if file.is_file())]
    assert not [text for text in texts if SECRET in text]
    assert "printed" in output
    assert "refused" in texts[1] + output


def test_a_breakpoint_on_debug_stops_in_the_main_thread(model_folder: Path, tmp_path: Path):
    agent = tmp_path / "stops.py"
    agent.write_text(
        "from astuner import Workflow, WorkflowOutput, bp\n\n\n"
        "class Stops(Workflow):\n"
        "    async def execute(self, workflow_task, model_tuner):\n"
        "        bp('HERE')\n"
        "        await model_tuner.chat([{'role': 'user', 'content': '?'}])\n"
        "        return WorkflowOutput(reward=1.0)\n"
    )
    job = make_job(model_folder, tmp_path, f"{agent}->Stops", "good", backbone="debug")
    command = [sys.executable, "-m", "astuner", "--conf", str(job.dump_job_as_yaml(tmp_path / "run.yaml")), "--db=HERE"]
    done = subprocess.run(
        [*command, "--exp-dir", str(tmp_path / "records")],
        input="p workflow_task.task.main_query\nc\nc\n",
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=tmp_path,
        env=os.environ,
    )
    assert done.returncode == 0, done.stderr
    assert "'good'" in done.stdout
