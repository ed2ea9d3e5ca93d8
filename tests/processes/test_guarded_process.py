"""A guarded process leaves nothing: no temporary file, and no shared memory although it had to be killed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil

from astuner.processes.guarded_process import GuardedProcess, TempDir
from astuner.system.process_tree import group_members

STUBBORN = """
import os, signal, sys, tempfile, time
from multiprocessing.shared_memory import SharedMemory
signal.signal(signal.SIGTERM, signal.SIG_IGN)
memory = SharedMemory(create=True, size=4096)
print(memory.name, tempfile.mkdtemp(), flush=True)
time.sleep(600)
"""


def test_a_killed_process_leaves_nothing() -> None:
    process = GuardedProcess([sys.executable, "-c", STUBBORN], Path("/"), os.environ, temp_dir=TempDir(), grace=0.5)
    assert process.output
    memory, tmp = process.output.readline().decode().split()
    assert (Path("/dev/shm") / memory).exists()
    assert Path(tmp).is_dir()
    process.end()
    assert not (Path("/dev/shm") / memory).exists()
    assert not Path(tmp).parent.exists()
    assert group_members(process.pid) == set()
    assert process.exit_code == 128 + 9
    process.output.close()


OUTSIDER = """
import os, sys, tempfile, time
if os.fork():
    print(tempfile.gettempdir(), flush=True)
    time.sleep(600)
os.setsid()
until = time.monotonic() + 3
while time.monotonic() < until:
    os.makedirs(os.path.join(os.environ["TMPDIR"], "logs"), exist_ok=True)
    time.sleep(0.01)
"""


def test_a_process_that_left_the_group_cannot_keep_the_temporary_folder() -> None:
    process = GuardedProcess([sys.executable, "-c", OUTSIDER], Path("/"), os.environ, temp_dir=TempDir(), grace=0.5)
    assert process.output
    tmp = Path(process.output.readline().decode().strip())
    assert tmp.is_dir()
    process.end()
    assert not tmp.exists()
    process.output.close()


def test_a_detached_process_runs_until_its_guard_is_signalled(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as output:
        process = GuardedProcess(["sleep", "600"], Path("/"), os.environ, output=output)
    assert process.output is None
    process.detach()
    process.end()  # has no effect any more
    assert {member.pid for member in group_members(process.pid)} == {process.pid}
    guard = psutil.Process(process.guard_pid)
    guard.terminate()
    assert guard.wait(30) is not None
    assert group_members(process.pid) == set()
