"""The owners of processes, in a file that this process, its forks and the guard share."""

from __future__ import annotations

import contextlib
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from astuner.system.process_tree import child_pids, find_process, mark_of

NO_EPISODE = "-"
"""The owner of a process that the run started outside of an episode."""


@dataclass
class ProcessOwners:
    """The owners of the processes that one process has started.

    A process that was started with an environment is recognised by its mark. A fork keeps the environment of the
    original process, so forks, and forks of forks, add themselves to the file. The file has no name and disappears
    with the last process that has it open.

    Attributes:
        file: descriptor of the file, opened for appending.
        pid: id of the process that started the processes.
        token: the process's part of the mark.
        since: creation time of the first process to consider, in seconds since the epoch.
    """

    file: int
    pid: int
    token: str
    since: float
    _offset: int = 0
    _entries: dict[int, tuple[str, float]] = field(default_factory=dict)

    def add(self, pid: int, owner: str) -> None:
        """Record the owner of a process, which must not have been reaped."""
        with contextlib.suppress(psutil.Error, OSError):
            os.write(self.file, f"{owner} {pid} {psutil.Process(pid).create_time()}\n".encode())

    def read(self) -> bool:
        """Read the lines that were added since the last call, and forget processes that have ended.

        Returns:
            Whether lines were added.
        """
        size = os.fstat(self.file).st_size
        content = os.pread(self.file, size - self._offset, self._offset)
        end = content.rfind(b"\n") + 1
        self._offset += end
        for line in content[:end].decode().splitlines():
            owner, pid, created = line.split()
            self._entries[int(pid)] = owner, float(created)
        self._entries = {pid: entry for pid, entry in self._entries.items() if psutil.pid_exists(pid)}
        return end > 0

    def owned(self) -> list[tuple[psutil.Process, str]]:
        """Return the recorded processes that run, with their owners."""
        found = [(find_process(pid, created), owner) for pid, (owner, created) in self._entries.items()]
        return [(process, owner) for process, owner in found if process is not None]

    def owner(self, pid: int) -> str | None:
        """Return the recorded owner of a process, which may be a zombie; None if there is none."""
        entry = self._entries.get(pid)
        return entry and entry[0]

    def children(self) -> list[tuple[psutil.Process, str | None]]:
        """Return the running children that were not recorded, with their owners.

        These children are orphans that this process has adopted, or were started by C code. The owner is None for a
        process without a mark, whose environment was cleared.
        """
        found: list[tuple[psutil.Process, str | None]] = []
        for pid in child_pids(self.pid):
            process = None if pid in self._entries else find_process(pid)
            if process is not None and process.create_time() >= self.since:
                found.append((process, self.owner_by_mark(process)))
        return found

    def owner_by_mark(self, process: psutil.Process) -> str | None:
        """Return the owner that a process's environment names; None if it names no owner in this run."""
        mark = mark_of(process)
        if self.token not in mark:
            return None
        position = mark.index(self.token) + 1
        return mark[position] if position < len(mark) else NO_EPISODE


def open_owners_file() -> int:
    """Return the descriptor of a new, nameless file that is opened for appending."""
    descriptor, name = tempfile.mkstemp(prefix="astuner-processes-")
    os.close(descriptor)
    try:
        return os.open(name, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
    finally:
        Path(name).unlink()
