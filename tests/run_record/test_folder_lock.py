from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from astuner.errors import RecordError
from astuner.run_record.folder import FolderLock, is_being_written

HOLDER = """
import os, sys, time
from pathlib import Path
from astuner.run_record.folder import FolderLock
lock = FolderLock(Path(sys.argv[1]))
if "fork" not in sys.argv:
    print(os.getpid(), flush=True)
elif os.fork() == 0:
    # Only now is the fork complete: the parent may be killed.
    print(os.getpid(), flush=True)
time.sleep(60)
"""


def start_holder(folder: Path, *arguments: str) -> tuple[subprocess.Popen[str], int]:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder), *arguments], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    return holder, int(holder.stdout.readline())


def end(holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.wait()
    assert holder.stdout is not None
    holder.stdout.close()


def test_live_run_of_another_process_is_named_and_its_kill_frees_the_folder(tmp_path: Path) -> None:
    holder, _ = start_holder(tmp_path / "exp")
    try:
        with pytest.raises(RecordError, match=rf"exp is being written by a live run \(process {holder.pid}\)"):
            FolderLock(tmp_path / "exp")
    finally:
        end(holder)
    FolderLock(tmp_path / "exp").release()


def test_second_lock_in_one_process_is_an_error_until_release(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path / "exp")
    with pytest.raises(RecordError, match=rf"process {os.getpid()}"):
        FolderLock(tmp_path / "x" / ".." / "exp")
    lock.release()
    lock.release()
    FolderLock(tmp_path / "exp").release()


def test_a_folder_is_being_written_until_its_lock_is_released(tmp_path: Path) -> None:
    folder = tmp_path / "exp"
    assert not is_being_written(folder)
    lock = FolderLock(folder)
    assert is_being_written(folder)
    with pytest.raises(RecordError):
        FolderLock(folder)
    assert is_being_written(folder), "a rejected lock marked the folder as free"
    lock.release()
    assert not is_being_written(folder)


def test_forked_worker_that_outlives_its_killed_parent_does_not_hold_the_lock(tmp_path: Path) -> None:
    holder, worker = start_holder(tmp_path / "exp", "fork")
    try:
        assert is_being_written(tmp_path / "exp")
        end(holder)
        os.kill(worker, 0)  # still alive
        FolderLock(tmp_path / "exp").release()
    finally:
        os.kill(worker, signal.SIGKILL)
