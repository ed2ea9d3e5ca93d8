"""Ends the processes of an episode when the episode ends.

An episode runs alone in its process, so every process that this process has gained during the episode belongs to it. On
Linux, this process adopts orphans (`PR_SET_CHILD_SUBREAPER`), so that a daemon is found although its parent has ended.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from loguru import logger

from astuner.errors import shorten
from astuner.system.paths import remove_folder
from astuner.system.process_tree import (
    GRACE_SECONDS,
    adopt_orphans,
    child_pids,
    end_processes,
    find_process,
    kept_pids,
    with_descendants,
)

_SHOWN = 5
_SHOWN_CHARACTERS = 100
# Servers that Python and debugpy start once for the whole process, and guards of the run's services.
_SHARED = re.compile(r"resource_tracker import main|debugpy[./]adapter|astuner\.processes\.guard")
_FORK_SERVER = re.compile(r"forkserver import main|fork_server\.serve\(\)")

_current: EpisodeProcesses | None = None
_has_warned = False
# Children of this process that an earlier episode has left, and that nobody may wait for.
_left: set[int] = set()


@dataclass(eq=False)
class EpisodeProcesses:
    """The processes of one episode.

    Attributes:
        ended: after the episode's end, descriptions of the processes that it had left running.
        folders: folders that are removed once the processes have ended.
    """

    episode_id: str
    ended: tuple[str, ...] = ()
    folders: list[Path] = field(default_factory=list)
    _earlier: frozenset[int] = frozenset()

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        """Own the processes that this process gains in the block, and end the remaining ones when the block ends."""
        global _current  # noqa: PLW0603 one episode runs in a process
        adopt_orphans()
        # Reap the ended processes of earlier episodes, among them orphans that this process has adopted.
        for pid in list(_left):
            try:
                is_ended = os.waitpid(pid, os.WNOHANG)[0] != 0
            except ChildProcessError:  # code of the episode has waited for it
                is_ended = True
            if is_ended:
                _left.discard(pid)
        if children := [process for pid in child_pids(os.getpid()) if (process := find_process(pid))]:
            self._earlier = frozenset(process.pid for process in with_descendants(children))
        _current = self
        try:
            yield
        finally:
            self.end()
            _current = None

    def end(self) -> None:
        """End the remaining processes. Thread-safe; further calls do nothing."""
        found: dict[psutil.Process, str] = {}

        def find() -> set[psutil.Process]:
            running = self._running()
            for process in running:
                found[process] = found.get(process) or _describe(process)
            return running

        remaining = end_processes(find, GRACE_SECONDS)
        if remaining:
            names = ", ".join(found[process] for process in remaining)
            logger.warning("episode {}: could not end {}", shorten(self.episode_id), names)
        if found:
            self.ended = tuple(text for _, text in sorted(found.items(), key=lambda entry: entry[0].pid))
            self._log()
        while self.folders:
            remove_folder(self.folders.pop())

    def _running(self) -> set[psutil.Process]:
        roots: list[psutil.Process | None] = []
        for pid in child_pids(os.getpid()):
            process = find_process(pid)
            command = _command(process) if process is not None else ""
            if _FORK_SERVER.search(command):
                roots += [find_process(fork) for fork in child_pids(pid) if fork not in self._earlier]
            elif pid not in self._earlier and pid not in kept_pids and not _SHARED.search(command):
                _left.add(pid)
                roots.append(process)
        return with_descendants(process for process in roots if process is not None)

    def _log(self) -> None:
        global _has_warned  # noqa: PLW0603 one warning is enough
        more = len(self.ended) - _SHOWN
        shown = ", ".join(self.ended[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
        count = (
            "1 process running, which was" if more == 1 - _SHOWN else f"{len(self.ended)} processes running, which were"
        )
        text = f"episode {shorten(self.episode_id)} left {count} ended: {shown}"
        if _has_warned:
            logger.debug("{}", text)
        else:
            logger.warning("{}. Start processes that several episodes share outside of `execute`", text)
        _has_warned = True


def current_episode_processes() -> EpisodeProcesses | None:
    """Return the owner of the processes that the caller starts; None outside an episode."""
    return _current


def end_current_episode() -> None:
    """End the processes of the episode that runs in this process, if any."""
    if _current is not None:
        _current.end()


def _command(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(" ".join(process.cmdline() or [process.name()]).split())
    return ""


def _describe(process: psutil.Process) -> str:
    text = _command(process)
    return f"{text[:_SHOWN_CHARACTERS]}{'…' if len(text) > _SHOWN_CHARACTERS else ''} (pid {process.pid})"
