"""Hooks in Python's functions that start processes and threads. They record which episode starts a process."""

from __future__ import annotations

import _posixsubprocess
import os
import re
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from multiprocessing.process import BaseProcess
from typing import Any

from astuner.processes.episode_processes import (
    EpisodeProcesses,
    after_fork,
    after_start,
    before_start,
    current_episode_processes,
    episode_processes_set,
)
from astuner.system.process_tree import MARK

# Servers that Python starts once for the whole process.
_SHARED_SERVER = re.compile(rb"(resource_tracker|forkserver) import main")
_ENV_ARGUMENT = 5

_installed = threading.Lock()


def install_hooks() -> None:
    """Install the hooks in this process. Further calls do nothing."""
    if not _installed.acquire(blocking=False):
        return
    # subprocess, asyncio, multiprocessing with "spawn"
    hooked = _hooked_fork_exec(_posixsubprocess.fork_exec)
    _posixsubprocess.fork_exec = hooked
    subprocess._fork_exec = hooked  # type: ignore[attr-defined]
    for name in ("posix_spawn", "posix_spawnp"):
        setattr(os, name, _hooked_posix_spawn(getattr(os, name)))
    os.system = _hooked_system(os.system)  # type: ignore[assignment]
    # os.fork, os.forkpty, os.spawn*, multiprocessing with "fork"
    os.register_at_fork(before=_before_fork, after_in_child=after_fork)
    # multiprocessing with "forkserver", whose processes are not children of this one
    BaseProcess.start = _hooked_process_start(BaseProcess.start)  # type: ignore[assignment, method-assign]
    # Before Python 3.14, threads do not inherit the context.
    threading.Thread.start = _hooked_thread_start(threading.Thread.start)  # type: ignore[assignment, method-assign]
    ThreadPoolExecutor.submit = _hooked_submit(ThreadPoolExecutor.submit)  # type: ignore[method-assign]


def _hooked_fork_exec(original: Callable[..., int]) -> Callable[..., int]:
    @wraps(original)
    def fork_exec(*args: Any) -> int:
        if any(_SHARED_SERVER.search(os.fsencode(word)) for word in args[0]):
            with episode_processes_set(None):
                return _started(original(*args))
        mark = before_start()
        if mark is not None:
            env = args[_ENV_ARGUMENT]
            if env is None:
                env = [os.fsencode(f"{name}={value}") for name, value in os.environ.items()]
            env = [pair for pair in env if not os.fsencode(pair).startswith(f"{MARK}=".encode())]
            args = (*args[:_ENV_ARGUMENT], [*env, f"{MARK}={mark}".encode()], *args[_ENV_ARGUMENT + 1 :])
        return _started(original(*args))

    return fork_exec


def _hooked_posix_spawn(original: Callable[..., int]) -> Callable[..., int]:
    @wraps(original)
    def posix_spawn(path: Any, argv: Any, env: Any, /, **options: Any) -> int:
        mark = before_start()
        return _started(original(path, argv, env if mark is None else {**env, MARK: mark}, **options))

    return posix_spawn


def _hooked_system(original: Callable[[Any], int]) -> Callable[[Any], int]:
    @wraps(original)
    def system(command: Any) -> int:
        if current_episode_processes() is None:
            return original(command)
        code = subprocess.call(command, shell=True)
        return code << 8 if code >= 0 else -code  # the format of os.wait

    return system


def _hooked_process_start(original: Callable[[BaseProcess], None]) -> Callable[[BaseProcess], None]:
    @wraps(original)
    def start(self: BaseProcess) -> None:
        before_start()
        original(self)
        if self.pid is not None:
            _started(self.pid)

    return start


def _hooked_thread_start(original: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    @wraps(original)
    def start(self: threading.Thread) -> None:
        processes = current_episode_processes()
        if processes is not None:
            self.run = _attributed(self.run, processes)  # type: ignore[method-assign]
        original(self)

    return start


def _hooked_submit(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def submit(self: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        # Functions outside of episodes are attributed, too, because an episode may have started the worker thread.
        return original(self, _attributed(function, current_episode_processes()), *args, **kwargs)

    return submit


def _attributed(function: Callable[..., Any], processes: EpisodeProcesses | None) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with episode_processes_set(processes):
            return function(*args, **kwargs)

    return run


def _before_fork() -> None:
    # Python ignores errors here, so that the fork of an ended episode exits in `after_fork`.
    if (processes := current_episode_processes()) is not None and processes.is_active:
        before_start()


def _started(pid: int) -> int:
    after_start(pid, current_episode_processes())
    return pid
