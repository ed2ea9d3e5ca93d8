"""Guard of a Ray instance that a run starts. When the run has been killed, the guard ends the instance's processes.

Ray binds its head's processes to the process that starts it, but not the agents of the node. They look for their
parent every few seconds and then report its death to the head, which has ended as well, so they can run for minutes.

`session_guard` starts the guard as `python -m astuner.backbone.ray_cluster.session_guard PID FOLDER`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from astuner.backbone.ray_cluster.environment import remove_ray_temp_dir
from astuner.system.child_process import start_module
from astuner.system.process_tree import child_pids, end_processes, environment_variable, find_process, is_running

SESSION = "ASTUNER_RAY_SESSION"
"""Environment variable in a Ray instance's processes: the instance's temporary folder."""

_POLL_SECONDS = 0.5
# Most processes of the instance end by themselves, and the processes of episodes are ended by guards of their own.
_PATIENCE_SECONDS = 5.0
_GRACE_SECONDS = 2.0


@contextlib.contextmanager
def session_guard(folder: str) -> Iterator[None]:
    """Run the guard during the block. The instance's processes have `folder`, its temporary one, in `SESSION`."""
    guard = start_module(
        "astuner.backbone.ray_cluster.session_guard",
        str(os.getpid()),
        folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in the terminal must not end it
    )
    try:
        yield
    finally:
        guard.kill()
        guard.wait()


def main() -> None:
    """Wait until the run has died, then end its Ray instance's processes and remove the folder."""
    run, folder = int(sys.argv[1]), sys.argv[2]
    seen: set[psutil.Process] = set()
    while os.getppid() == run:
        seen = {process for process in seen | _node_processes(run, folder) if is_running(process)}
        time.sleep(_POLL_SECONDS)

    def left() -> set[psutil.Process]:
        marked = {process for process in psutil.process_iter() if environment_variable(process, SESSION) == folder}
        return {process for process in marked | seen if is_running(process)}

    until = time.monotonic() + _PATIENCE_SECONDS
    while left() and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
    end_processes(left, _GRACE_SECONDS)
    remove_ray_temp_dir(Path(folder))


def _node_processes(run: int, folder: str) -> set[psutil.Process]:
    """Return the processes that the head's processes have started.

    They must be found while the head runs: they have overwritten a part of their environment with their title.
    """
    heads = [process for pid in child_pids(run) if (process := find_process(pid)) is not None]
    nodes = [child_pids(head.pid) for head in heads if environment_variable(head, SESSION) == folder]
    return {process for pids in nodes for pid in pids if (process := find_process(pid)) is not None}


if __name__ == "__main__":
    main()
