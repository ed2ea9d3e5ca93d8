"""Whole runs of the verl backbone on a random model, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil

from astuner import AstunerJob
from astuner.run_record import read_metrics

AGENTS = Path(__file__).parent / "accidents.py"
PATIENCE = 400.0


def make_job(workflow: str, model: Path, folder: Path, **settings: Any) -> AstunerJob:
    """A job of steps of 2 tasks × 4 episodes."""
    rows = [{"question": f"question {i}", "answer": "", "unlucky": i % 2 == 0} for i in range(6)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "val.jsonl").write_text("".join(json.dumps(row | {"question": "?"}) + "\n" for row in rows[:2]))
    values: dict[str, Any] = {
        "experiment_name": "run",
        "backbone": "verl",
        "model__renderer": "qwen3",
        "data__train_batch_size": 2,
        "data__shuffle": False,
        "rollout__num_repeat": 4,
        "rollout__temperature": 1.0,
        "rollout__max_response_length_in_one_turn": 6,
        "rollout__max_model_len": 256,
        "rollout__compute_madness_checklist": [],
        "rollout__val_kwargs__temperature": 1.0,
        "rollout__val_kwargs__do_sample": True,
        "trainer_common__mini_batch_num": 2,
        "trainer_common__save_freq": 1,
        "trainer_common__use_kl_loss": False,
        "trainer_common__optim__lr": 1e-2,
        "trainer_common__val_pass_n": 2,
    }
    job = AstunerJob(algorithm="grpo", model=model, **(values | settings))
    job.set_workflow(f"{AGENTS}->{workflow}")
    return job.set_data("file", folder / "train.jsonl", validation_path=folder / "val.jsonl")


class Run:
    """A run in a process of its own, all of whose descendants can be found."""

    def __init__(self, job: AstunerJob, folder: Path, *words: str, **environment: str) -> None:
        self.mark = uuid4().hex
        self.record = folder / "records" / "run"
        (folder / "accidents").mkdir(exist_ok=True)
        yaml = job.dump_job_as_yaml(folder / "run.yaml")
        command = [
            sys.executable,
            "-m",
            "astuner",
            "--conf",
            str(yaml),
            "--exp-dir",
            str(folder / "records"),
            *words,
        ]
        marked = {"ACCIDENTS": str(folder / "accidents"), "ASTUNER_TEST_MARK": self.mark}
        self.log = folder / f"{self.mark}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env=os.environ | marked | environment,
                cwd=folder,
                start_new_session=True,
            )

    def ended(self) -> tuple[int, str]:
        """Wait for the end; return the exit code and what was printed."""
        try:
            code = self.process.wait(PATIENCE)
        finally:
            self.process.kill()
        return code, self.log.read_text()

    def wait_for(self, step: int) -> None:
        """Wait until the step is in the record."""
        until = time.monotonic() + PATIENCE
        while step not in losses(self.record):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < until, self.log.read_text()
            time.sleep(0.1)

    def wait_until_said(self, text: str) -> None:
        """Wait until the run prints it."""
        until = time.monotonic() + PATIENCE
        while text not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < until, self.log.read_text()
            time.sleep(0.1)

    def leftovers(self) -> list[str]:
        """The run's processes that are there, after some patience."""
        for _ in range(300):
            found = [process for process in psutil.process_iter() if self._is_mine(process)]
            if not found:
                return []
            time.sleep(0.1)
        return [str(process) for process in found]

    def _is_mine(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get("ASTUNER_TEST_MARK") == self.mark and process.status() != "zombie"
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False


def losses(record: Path) -> dict[int, float]:
    """The policy loss by step."""
    if not (record / "metrics.jsonl").exists():
        return {}
    return {row.step: row.metrics["loss/policy"] for row in read_metrics(record) if "loss/policy" in row.metrics}
