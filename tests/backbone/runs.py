"""Runs in separate processes, and the failures that are injected into them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from uuid import uuid4

import psutil

from astuner import AstunerJob
from astuner.run_record import read_metrics
from astuner.system.process_tree import environment_variable
from tests.preloaded import AstunerProcess

PATIENCE = 400.0


class Run:
    """A run in a separate process; its descendants can be listed."""

    def __init__(self, job: AstunerJob, folder: Path, *words: str, **environment: str) -> None:
        self.mark = uuid4().hex
        self.record = folder / "records" / "run"
        (folder / "shared").mkdir(exist_ok=True)
        yaml = job.dump_job_as_yaml(folder / "run.yaml")
        marked = {"SHARED_FOLDER": str(folder / "shared"), "ASTUNER_TEST_MARK": self.mark}
        self.log = folder / f"{self.mark}.log"
        with self.log.open("w") as log:
            command = ("--conf", str(yaml), "--exp-dir", str(folder / "records"), *words)
            env = os.environ | marked | environment
            self.process: subprocess.Popen[bytes] | AstunerProcess
            if job.config.astuner.backbone in ("trinity", "verl"):  # some variables act at an interpreter's start only
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "astuner", *command],
                    stdout=log,
                    stderr=log,
                    env=env,
                    cwd=folder,
                    start_new_session=True,
                )
            else:
                self.process = AstunerProcess(*command, output=log, env=env, cwd=folder, start_new_session=True)

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

    def wait_for_output(self, text: str) -> None:
        """Wait until the run prints it."""
        until = time.monotonic() + PATIENCE
        while text not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < until, self.log.read_text()
            time.sleep(0.1)

    def leftovers(self) -> list[str]:
        """The run's processes that are there, after some patience: Ray's agent ends up to 30 s after a killed run."""
        until = time.monotonic() + PATIENCE
        while matches := [process for process in psutil.process_iter() if self._is_mine(process)]:
            if time.monotonic() > until:
                break
            time.sleep(0.1)
        return [str(process) for process in matches]

    def actor(self, name: str) -> psutil.Process:
        """The process of a Ray actor of the run."""
        (match,) = self._titled(f"ray::{name}")
        return match

    def wait_until_actor(self, name: str) -> None:
        """Wait until the run has a process for a Ray actor of that name."""
        until = time.monotonic() + PATIENCE
        while not self._titled(f"ray::{name}"):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < until, self.log.read_text()
            time.sleep(0.1)

    def command(self, word: str) -> psutil.Process:
        """The process of the run that has a word in its command line."""
        (match,) = [
            candidate
            for candidate in psutil.process_iter()
            if self._is_mine(candidate) and word in _title(candidate).split()
        ]
        return match

    def _titled(self, title: str) -> list[psutil.Process]:
        return [
            candidate
            for candidate in psutil.process_iter()
            if self._is_mine(candidate) and _title(candidate).startswith(title)
        ]

    def _is_mine(self, process: psutil.Process) -> bool:
        try:
            is_mine = environment_variable(process, "ASTUNER_TEST_MARK") == self.mark
            if isinstance(self.process, AstunerProcess):  # it and its forks have the environment of the server
                is_mine = is_mine or os.getsid(process.pid) == self.process.pid
            return is_mine and process.status() != "zombie"
        except (psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError):
            return False


def error_beside_a_record(job: AstunerJob, folder: Path, *words: str) -> str:
    """Start a run over an earlier record, check that it is rejected and the record unchanged, and return its output."""
    earlier = folder / "records" / "run" / "config.yaml"
    earlier.parent.mkdir(parents=True)
    earlier.write_text("of an earlier run")
    code, printed = Run(job, folder, *words).ended()
    assert code == 1, printed
    assert {candidate.name for candidate in (folder / "records").iterdir()} == {"run", ".run.lock"}
    assert earlier.read_text() == "of an earlier run"
    return printed


def losses(record: Path) -> dict[int, float]:
    """The policy loss by step."""
    if not (record / "metrics.jsonl").exists():
        return {}
    return {row.step: row.metrics["loss/policy"] for row in read_metrics(record) if "loss/policy" in row.metrics}


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""
