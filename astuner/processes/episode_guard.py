"""Guard of a process that runs episodes. When that process has died, the guard ends the processes of its episodes.

`episode_processes` starts the guard as `python -m astuner.processes.episode_guard PID TOKEN SINCE`, with the file of
`ProcessOwners` as stdin.
"""

from __future__ import annotations

import os
import sys
import time

import psutil

from astuner.processes.process_owners import NO_EPISODE, ProcessOwners
from astuner.system.process_tree import end_processes, with_descendants

GRACE_SECONDS = 2.0
"""Seconds between SIGTERM and SIGKILL for the processes of an episode."""
# An orphan without a mark must be found before the process dies. Most daemons become orphans right after their start.
_POLL_SECONDS = 0.5
_POLL_SECONDS_AFTER_START = 0.05
_STARTING_SECONDS = 1.0


def main() -> None:
    """Wait until the process has died, then end its episodes' processes."""
    pid, token, since = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    owners = ProcessOwners(sys.stdin.fileno(), pid, token, since)
    orphans: dict[psutil.Process, None] = {}
    last_start = time.monotonic()
    while os.getppid() == pid:
        if owners.read():
            last_start = time.monotonic()
        orphans.update({process: None for process, owner in owners.children() if owner is None})
        is_starting = time.monotonic() - last_start < _STARTING_SECONDS
        time.sleep(_POLL_SECONDS_AFTER_START if is_starting else _POLL_SECONDS)
    end_processes(lambda: _left_running(owners, list(orphans)), GRACE_SECONDS)


def _left_running(owners: ProcessOwners, orphans: list[psutil.Process]) -> set[psutil.Process]:
    owners.read()
    roots = [process for process, owner in owners.owned() if owner != NO_EPISODE]
    for process in orphans:
        # A child that was found between its fork and its exec has its mark now.
        if owners.owner(process.pid) is None and owners.owner_by_mark(process) is None:
            roots.append(process)
    roots.extend(
        process for process in psutil.process_iter() if owners.owner_by_mark(process) not in (None, NO_EPISODE)
    )
    return with_descendants(roots) - {psutil.Process()}


if __name__ == "__main__":
    main()
