"""Ends the processes of an episode when the episode ends.

A process belongs to the episode whose code started it, in any thread or task. Its descendants belong to the same
episode. `process_hooks` records which episode starts a process. On Linux, this process adopts orphans
(`PR_SET_CHILD_SUBREAPER`), so that a daemon is found although its parent has ended. If this process is killed, a guard
process ends the processes of all episodes.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import ctypes
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import psutil
from loguru import logger

import astuner
from astuner.errors import shorten
from astuner.processes.episode_guard import GRACE_SECONDS
from astuner.processes.process_owners import NO_EPISODE, ProcessOwners, open_owners_file
from astuner.system.process_tree import (
    MARK,
    child_pids,
    creation_clock,
    end_processes,
    mark_of,
    thread_child_pids,
    with_descendants,
)

_PR_SET_CHILD_SUBREAPER = 36
_CLOCK_SECONDS = 1.0
_ZOMBIE_SECONDS = 1.0
_REAP_SECONDS = 0.5
_SHOWN = 5
_SHOWN_CHARACTERS = 100

_current: ContextVar[EpisodeProcesses | None] = ContextVar("astuner_episode_processes", default=None)


@dataclass(eq=False)
class EpisodeProcesses:
    """The processes of one episode.

    Attributes:
        episode_id: the id of the episode, for the log.
        key: identifies the episode in the environment of its processes.
        ended: after the end of the episode, descriptions of the processes that it had left running.
        has_started_any: whether Python code of the episode has started a process.
        pid: the process that runs the episode.
        folders: folders that are removed once the processes have ended.
    """

    episode_id: str
    key: str = field(default_factory=lambda: uuid4().hex)
    ended: tuple[str, ...] = ()
    has_started_any: bool = False
    pid: int = 0
    folders: list[Path] = field(default_factory=list)
    _started: float = 0.0
    _thread: str | None = None
    _earlier: frozenset[int] = frozenset()

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        """Own the processes that the block starts, and end the remaining ones when the block ends."""
        tracker = _tracker_of_this_process()
        self.pid = os.getpid()
        self._started = creation_clock()
        # Orphans become children of the main thread.
        if sys.platform == "linux" and threading.current_thread() is not threading.main_thread():
            self._thread = f"/proc/self/task/{threading.get_native_id()}"
            self._earlier = frozenset(thread_child_pids(self._thread))
        tracker.active[self.key] = self
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)
            self.end()

    @property
    def is_active(self) -> bool:
        """Whether the episode runs and may start processes."""
        return _tracker is not None and self.key in _tracker.active

    def end(self) -> None:
        """End the remaining processes. The episode cannot start further ones. Further calls do nothing."""
        _tracker_of_this_process().end([self])

    def started_by_thread(self, owners: ProcessOwners) -> list[int]:
        """Return the processes that C code started in the episode's thread."""
        if self._thread is None:
            return []
        return [
            pid for pid in thread_child_pids(self._thread) if pid not in self._earlier and owners.owner(pid) is None
        ]

    def may_own(self, process: psutil.Process) -> bool:
        """Return whether the episode may have started a process that has no mark."""
        return self.has_started_any and process.create_time() >= self._started - _CLOCK_SECONDS

    def has_nothing(self, owners: ProcessOwners) -> bool:
        """Return whether the episode has started no process."""
        return not self.has_started_any and not self.started_by_thread(owners)


def current_episode_processes() -> EpisodeProcesses | None:
    """Return the owner of the processes that the caller starts; None outside of episodes."""
    processes = _current.get()
    # A fork that runs episodes itself is no longer part of the episode that forked it.
    return processes if processes and _tracker and processes.pid == _tracker.owners.pid else None


@contextlib.contextmanager
def episode_processes_set(processes: EpisodeProcesses | None) -> Iterator[None]:
    """Attribute the processes that the block starts to another episode; None for no episode."""
    token = _current.set(processes)
    try:
        yield
    finally:
        _current.reset(token)


class _Tracker:
    """The processes that belong to this process's episodes."""

    def __init__(self) -> None:
        outer = os.environ.get(MARK)
        token = uuid4().hex
        self.mark = f"{outer}/{token}" if outer else token
        self.active: dict[str, EpisodeProcesses] = {}
        # Episodes whose processes are being ended. The thread that does so may be interrupted.
        self._ending: dict[str, EpisodeProcesses] = {}
        self.lock = threading.RLock()
        self.owners = ProcessOwners(open_owners_file(), os.getpid(), token, creation_clock())
        self._guard: subprocess.Popen[bytes] | None = None
        self._zombies: dict[int, float] = {}
        self._reaped_at = -_REAP_SECONDS
        self._has_warned = False
        os.environ[MARK] = self.mark
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        atexit.register(self._close)

    def add(self, pid: int, processes: EpisodeProcesses | None) -> None:
        """Record the owner of a process. If its episode has already ended, end the process."""
        with self.lock:
            self.owners.add(pid, processes.key if processes else NO_EPISODE)
        if processes is not None and processes.key not in self.active:
            with contextlib.suppress(psutil.Error):
                psutil.Process(pid).kill()

    def start_guard(self) -> None:
        """Start the guard with the first process of an episode."""
        with self.lock:
            if self._guard is None:
                # The guard belongs to no episode.
                self._guard = contextvars.Context().run(self._started_guard)

    def _started_guard(self) -> subprocess.Popen[bytes]:
        owners = self.owners
        command = (sys.executable, "-P", "-m", "astuner.processes.episode_guard")
        package = str(Path(astuner.__file__).parents[1])
        python_path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        return subprocess.Popen(
            (*command, str(owners.pid), owners.token, str(owners.since)),
            env={**os.environ, "PYTHONPATH": python_path},
            stdin=owners.file,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal must not end it
        )

    def end(self, ending: Iterable[EpisodeProcesses]) -> None:
        """End the processes of active episodes, and log what was ended."""
        with self.lock:
            ended = [episode for episode in ending if self.active.pop(episode.key, None)]
            self.owners.read()
            # An orphan without a mark ends with the last episode that may have started it.
            has_none = all(episode.has_nothing(self.owners) for episode in ended)
            if not has_none:
                self._ending.update({episode.key: episode for episode in ended})
        if not has_none:
            self._end(ended)
        for episode in ended:
            while episode.folders:
                remove_folder(episode.folders.pop())

    def end_all(self) -> None:
        """End the active episodes' processes, and those that another thread is ending."""
        self.end(list(self.active.values()))
        with self.lock:
            interrupted = list(self._ending.values())
        if interrupted:
            self._end(interrupted)

    def _end(self, ended: list[EpisodeProcesses]) -> None:
        found: dict[psutil.Process, tuple[EpisodeProcesses, str]] = {}

        def find() -> set[psutil.Process]:
            roots = self._find(ended)
            for process in sorted(roots, key=lambda process: process.create_time()):
                found.setdefault(process, (roots[process], _describe(process)))
            return set(roots)

        remaining = end_processes(find, GRACE_SECONDS)
        with self.lock:
            ended = [episode for episode in ended if self._ending.pop(episode.key, None)]
        for episode in ended:
            episode.ended = tuple(text for owner, text in found.values() if owner is episode)
            self._log(episode, [found[process][1] for process in remaining if found[process][0] is episode])
        self._reap_zombies()

    def _find(self, ended: list[EpisodeProcesses]) -> dict[psutil.Process, EpisodeProcesses]:
        """Return the running processes of episodes, with their owners."""
        by_key = {episode.key: episode for episode in ended}
        roots: list[tuple[psutil.Process, EpisodeProcesses]] = []
        with self.lock:
            self.owners.read()
            owned: list[tuple[psutil.Process, str | None]] = [*self.owners.owned(), *self._marked()]
            for process, owner in owned:
                episode = by_key.get(owner) if owner else self._owner_by_time(process, ended)
                if episode is not None:
                    roots.append((process, episode))
            for episode in ended:
                for pid in episode.started_by_thread(self.owners):
                    with contextlib.suppress(psutil.Error):
                        roots.append((psutil.Process(pid), episode))
        return {process: episode for root, episode in roots for process in with_descendants([root])}

    def _marked(self) -> list[tuple[psutil.Process, str | None]]:
        if sys.platform == "linux":
            return self.owners.children()
        # Orphans are not adopted.
        marked = [process for process in psutil.process_iter() if self.owners.token in mark_of(process)]
        return [(process, self.owners.owner_by_mark(process)) for process in marked]

    def _owner_by_time(self, process: psutil.Process, ended: list[EpisodeProcesses]) -> EpisodeProcesses | None:
        """Return the owner of an orphan without a mark; None while an active episode may have started it."""
        if any(episode.may_own(process) for episode in self.active.values()):
            return None
        return next((episode for episode in ended if episode.may_own(process)), ended[0])

    def _log(self, episode: EpisodeProcesses, remaining: list[str]) -> None:
        if remaining:
            logger.warning("episode {}: could not end {}", shorten(episode.episode_id), ", ".join(remaining))
        if not episode.ended:
            return
        more = len(episode.ended) - _SHOWN
        shown = ", ".join(episode.ended[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
        count = (
            "1 process running, which was"
            if more == 1 - _SHOWN
            else f"{len(episode.ended)} processes running, which were"
        )
        text = f"episode {shorten(episode.episode_id)} left {count} ended: {shown}"
        if self._has_warned:
            logger.debug("{}", text)
        else:
            logger.warning("{}. Start processes that several episodes share outside of `execute`", text)
        self._has_warned = True

    def _reap_zombies(self) -> None:
        """Reap ended orphans that this process has adopted, and processes of ended episodes that nobody waits for."""
        with self.lock:
            now = time.monotonic()
            if now < self._reaped_at + _REAP_SECONDS:  # it reads the children of every thread
                return
            self._reaped_at = now
            zombies: dict[int, float] = {}
            for pid in child_pids(os.getpid()):
                with contextlib.suppress(psutil.Error):
                    process = psutil.Process(pid)
                    if process.status() == psutil.STATUS_ZOMBIE and self._is_left(process):
                        zombies[pid] = self._zombies.get(pid, now)
            # Code that waits for its child has reaped it by then.
            for pid in [pid for pid, since in zombies.items() if now - since > _ZOMBIE_SECONDS]:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            self._zombies = zombies

    def _is_left(self, zombie: psutil.Process) -> bool:
        owner = self.owners.owner(zombie.pid)
        if owner is None:
            return zombie.create_time() >= self.owners.since
        return owner != NO_EPISODE and owner not in self.active

    def in_forked_child(self) -> None:
        """Record this process, which is a fork, and its mark."""
        self.lock = threading.RLock()  # another thread of the parent may have held it
        processes = current_episode_processes()
        self.owners.add(os.getpid(), processes.key if processes else NO_EPISODE)
        if processes is None:
            return
        if processes.key not in self.active:
            os._exit(1)
        os.environ[MARK] = f"{self.mark}/{processes.key}"

    def _close(self) -> None:
        if self.owners.pid != os.getpid():  # a fork
            return
        self.end_all()
        if self._guard is not None:
            self._guard.kill()
            self._guard.wait()


def remove_folder(folder: Path) -> None:
    """Remove a folder with its contents, including read-only folders. Files that cannot be removed are left."""

    def make_writable(function: Callable[..., object], path: str, _: object) -> None:
        with contextlib.suppress(OSError):
            for changed in (os.path.dirname(path), path):
                if not os.path.islink(changed):
                    os.chmod(changed, 0o700)
            shutil.rmtree(path) if function is not os.unlink else os.unlink(path)

    shutil.rmtree(folder, onerror=make_writable)


def _describe(process: psutil.Process) -> str:
    words: list[str] = []
    with contextlib.suppress(psutil.Error):
        words = process.cmdline() or [process.name()]
    text = " ".join(" ".join(words).split())
    return f"{text[:_SHOWN_CHARACTERS]}{'…' if len(text) > _SHOWN_CHARACTERS else ''} (pid {process.pid})"


_tracker: _Tracker | None = None
_tracker_lock = threading.Lock()


def _tracker_of_this_process() -> _Tracker:
    """Return the tracker of this process. The first call in a process, or in a fork of it, creates the tracker."""
    global _tracker  # noqa: PLW0603 the tracker belongs to the whole process
    with _tracker_lock:
        if _tracker is None or _tracker.owners.pid != os.getpid():
            _tracker = _Tracker()
        return _tracker


def end_all_episodes() -> None:
    """End the processes of all episodes that run in this process."""
    if _tracker is not None:
        _tracker.end_all()


def before_start() -> str | None:
    """Prepare to start a process; return its value of `ASTUNER_EPISODE`, None outside episodes.

    Raises:
        ProcessLookupError: the caller's episode has ended.
    """
    processes = current_episode_processes()
    if processes is None or _tracker is None:
        return None
    if not processes.is_active:
        raise ProcessLookupError(
            f"episode {shorten(processes.episode_id)} has ended, so its threads cannot start processes. Start "
            "a thread that serves several episodes outside of `execute`, for example when the module is imported"
        )
    processes.has_started_any = True
    _tracker.start_guard()
    return f"{_tracker.mark}/{processes.key}"


def after_start(pid: int, processes: EpisodeProcesses | None) -> None:
    """Record the owner of a process that was started."""
    if _tracker is not None:
        _tracker.add(pid, processes)


def after_fork() -> None:
    """Record the owner of this process, which was forked."""
    global _tracker_lock  # noqa: PLW0603 another thread of the parent may have held it
    _tracker_lock = threading.Lock()
    if _tracker is not None:
        _tracker.in_forked_child()
