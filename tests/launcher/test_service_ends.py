"""Services are gone after their run, whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.launcher.conftest import Command
from tests.launcher.liveness import lives, wait_for
from tests.launcher.service_processes import Declare, assert_gone, processes, served
from tests.preloaded import AstunerProcess

RUN = Path("launcher_record/run")
ONE_STEP = "astuner.trainer_common.total_training_steps=1"
HANGS = "astuner.rollout.agentscope_workflow='agents->HangsFromTheStart'"


@pytest.fixture
def hanging(declare: Declare, port: int, folder: Path) -> Iterator[AstunerProcess]:
    """A run with a service `env`, in a separate process, during its first step."""
    declare(env=served(port, env={"STUBBORN": 1}))
    arguments = ["--conf", "run.yaml", "--with-env", HANGS]
    with (folder / "out.txt").open("wb") as out:
        run = AstunerProcess(*arguments, cwd=folder, output=out)
    try:
        wait_for(lambda: (RUN / "services/env.log").exists() and Path("note").exists())
        assert all(map(lives, processes()))
        yield run
    finally:
        run.kill()
        run.wait()
        for pid in filter(lives, processes()):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (["astuner.task_reader.dataset_file.training.file_path=empty.jsonl"], "empty.jsonl"),
        (["astuner.rollout.agentscope_workflow='agents->AlwaysRaises'"], "episodes failed"),
    ],
)
def test_services_stop_when_the_run_fails(
    astuner: Command, declare: Declare, port: int, settings: list[str], error: str
):
    declare(env=served(port))
    Path("empty.jsonl").touch()
    astuner("--conf", "run.yaml", "--with-env", *settings).says(error)
    assert_gone(port)


def test_ctrl_c_stops_services(hanging: AstunerProcess, port: int, folder: Path):
    time.sleep(1)
    hanging.send_signal(signal.SIGINT)
    assert hanging.wait(60) == 130, (folder / "out.txt").read_text()
    assert_gone(port)  # by SIGKILL for the child, which ignores SIGTERM


def test_services_do_not_outlive_a_launcher_that_is_killed(hanging: AstunerProcess, port: int):
    hanging.kill()
    hanging.wait()
    wait_for(lambda: not any(map(lives, processes())), 20)
    assert_gone(port)


FORKS_AND_IS_KILLED = """
import os, signal, sys, time
from pathlib import Path
from astuner.processes.guarded_process import GuardedProcess
service = GuardedProcess(["sleep", "600"], Path.cwd(), os.environ)
child = os.fork()
if child == 0:
    time.sleep(600)
print(service.pid, child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_forked_process_that_outlives_the_launcher_keeps_no_service_alive(tmp_path: Path):
    with (tmp_path / "out").open("w+") as out:
        subprocess.run([sys.executable, "-c", FORKS_AND_IS_KILLED], stdout=out, timeout=60, check=False)
        out.seek(0)
        service, child = map(int, out.read().split())
    try:
        wait_for(lambda: not lives(service), 20)
        assert lives(child)
    finally:
        os.kill(child, signal.SIGKILL)


def test_ctrl_c_while_a_service_is_waited_for(astuner: Command, declare: Declare, port: int):
    declare(env=served(port, path="/nothing"))

    def interrupt() -> None:
        wait_for(Path("note").exists)
        os.kill(os.getpid(), signal.SIGINT)

    impatient = threading.Thread(target=interrupt)
    impatient.start()
    ended = astuner("--conf", "run.yaml", "--with-env")
    impatient.join()
    assert ended.code == 130, ended.out
    assert ended.out.endswith("interrupted\n")
    assert_gone(port)


def test_a_service_ends_when_launcher_and_guard_are_killed_together(hanging: AstunerProcess, port: int):
    leader = processes()[0]
    guard = psutil.Process(leader).parent()
    assert guard is not None
    assert guard.ppid() == hanging.pid
    os.kill(guard.pid, signal.SIGSTOP)  # so that it cannot act on the launcher's end
    hanging.kill()
    guard.kill()
    hanging.wait()
    wait_for(lambda: not lives(leader), 10)
