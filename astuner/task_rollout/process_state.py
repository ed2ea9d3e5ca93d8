"""Settings of the process that episodes share. Changes by an episode are detected, reported and restored.

Episodes in threads share the process, so the author of a change is known only if no other episode ran. Otherwise, all
episodes that ran are reported. A change that breaks other code immediately, such as a closed stream, is restored when
it is detected. Other changes may be temporary (`contextlib.chdir`). They are restored after the end of all episodes
that may undo them. Settings of one thread are restored after each of its episodes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

from loguru import logger

from astuner.errors import short_repr, shorten
from astuner.system.redaction.output import reopened_stream
from astuner.system.signals import signal_handlers
from astuner.task_rollout.process_settings import (
    ProcessSetting,
    process_settings,
    read_setting,
    restore_setting,
    thread_settings,
)

_STREAMS = ("stdin", "stdout", "stderr")
_ALARMS = (signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF)


@dataclass(eq=False)
class RunningMark:
    """A running episode, with the changes that it may have made."""

    effects: list[str] = field(default_factory=list)


_SHARED = " (by this episode or another that ran at the same time)"


class ProcessState:
    """The process settings when a batch of episodes starts. Thread-safe."""

    def __init__(self, *, in_main_thread: bool = False) -> None:
        """Read the settings; `in_main_thread` says whether the episodes run in the main thread."""
        self._lock = threading.Lock()
        self._copies = [None if _file_id(fd) is None else os.dup(fd) for fd in range(3)]
        self._streams = {name: getattr(sys, name) for name in _STREAMS}
        self._settings = process_settings(in_main_thread)
        for name in _STREAMS:
            self._settings[f"sys.{name}"] = ProcessSetting(
                partial(self._stream_type, name), partial(self._restore_stream, name)
            )
        for fd, copy in enumerate(self._copies):
            if copy is not None:
                self._settings[f"file descriptor {fd}"] = ProcessSetting(
                    partial(_file_id, fd), partial(_redirect, copy, fd)
                )
        self._values = {name: read_setting(setting) for name, setting in self._settings.items()}
        self._running: set[RunningMark] = set()
        self._waiting: dict[str, set[RunningMark]] = {}
        self._expired: deque[str] = deque()
        self._is_closed = False
        self._checks_begun = 0

    def close(self) -> None:
        """Stop watching."""
        with self._lock:
            self._is_closed = True
            for copy in self._copies:
                with contextlib.suppress(OSError):  # an episode closed it
                    if copy is not None:
                        os.close(copy)

    @contextlib.contextmanager
    def watched(self) -> Iterator[RunningMark]:
        """Detect the changes that an episode makes in the block. Afterwards, the mark has their descriptions."""
        mark = RunningMark()
        self.check()
        settings = thread_settings()
        before = {name: read_setting(setting) for name, setting in settings.items()}
        with self._lock:
            self._running.add(mark)
        try:
            yield mark
        finally:
            self.check()
            for name, setting in settings.items():
                if (now := read_setting(setting)) != before[name]:
                    restore_setting(setting, before[name])
                    mark.effects.append(f"{name}: {_difference(before[name], now)}")
            with self._lock:
                self._running.discard(mark)
                self._restore_changes_of(mark)

    @contextlib.contextmanager
    def alarms_ignored(self) -> Iterator[None]:
        """Ignore and report alarms without a handler (`signal.setitimer`), which would end the process."""
        unhandled = [number for number in _ALARMS if signal.getsignal(number) is signal.SIG_DFL]
        with signal_handlers(unhandled, self._on_alarm):
            if (setting := self._settings.get("signal handlers")) is not None:
                self._values["signal handlers"] = read_setting(setting)
            yield

    def _on_alarm(self, number: int, _frame: FrameType | None) -> None:
        # The signal may interrupt a thread that holds the lock.
        self._expired.append(signal.Signals(number).name)

    def check(self) -> None:
        """Detect changes, and restore the urgent ones."""
        begun = self._checks_begun
        with self._lock:
            # Another check that began while this one waited has seen the same changes.
            if self._is_closed or self._checks_begun > begun:
                return
            self._checks_begun += 1
            changes = self._restore_streams()
            while self._expired:
                alarm = f"{self._expired.popleft()}: a timer without a handler expired"
                if not self._running:  # Python calls the handler when the main thread wakes
                    logger.warning("{}; an episode that has ended had set it", alarm)
                elif alarm not in changes:
                    changes.append(alarm)
            for name, setting in self._settings.items():
                before, now = self._values[name], read_setting(setting)
                if now == before:
                    self._waiting.pop(name, None)
                elif setting.is_urgent:
                    self._restore(name)
                    changes.append(f"{name}: {_difference(before, now)}")
                elif self._running:
                    self._waiting.setdefault(name, set(self._running))
            for mark in self._running:
                mark.effects += changes if len(self._running) == 1 else [change + _SHARED for change in changes]

    def _restore_changes_of(self, mark: RunningMark) -> None:
        """Restore the changes whose possible authors have all ended. The episode of `mark` is the last author."""
        for name, authors in list(self._waiting.items()):
            if not self._is_closed and not authors & self._running:
                del self._waiting[name]
                before, now = self._values[name], read_setting(self._settings[name])
                self._restore(name)
                shared = "" if authors == {mark} else _SHARED
                mark.effects.append(f"{name}: {_difference(before, now)}{shared}")

    def _restore(self, name: str) -> None:
        restore_setting(self._settings[name], self._values[name])

    def _stream_type(self, name: str) -> str:
        """Return the type of a standard stream that an episode has replaced (`contextlib.redirect_stdout`)."""
        stream = getattr(sys, name, None)
        return "stream of the run" if stream is self._streams[name] else type(stream).__name__

    def _restore_stream(self, name: str, _: object) -> None:
        setattr(sys, name, self._streams[name])

    def _restore_streams(self) -> list[str]:
        """Reopen closed standard streams, and return descriptions of them."""
        changes = []
        for fd, name in enumerate(_STREAMS):
            copy, stream = self._copies[fd], self._streams[name]
            if copy is not None and _file_id(fd) is None:
                with contextlib.suppress(OSError):  # an episode closed the copy, too
                    _redirect(copy, fd)
                    changes.append(f"file descriptor {fd}: closed")
            current = getattr(sys, name, None)
            if stream is not None and (current is None or getattr(current, "closed", False)):
                if getattr(stream, "closed", False):
                    self._streams[name] = reopened_stream(stream, fd)
                setattr(sys, name, self._streams[name])
                changes.append(f"sys.{name}: closed")
        return changes


def _file_id(fd: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _redirect(copy: int, fd: int, _: object = None) -> None:
    os.dup2(copy, fd)


def _difference(before: Any, now: Any) -> str:
    """Describe a change; of a mapping, the keys that changed, because the values may be secrets."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = [str(key) for key in {**before, **now} if before.get(key) is not now.get(key)]
        changed = sorted(key for key in keys if before.get(key) != now.get(key)) or sorted(keys)
        return ", ".join(map(shorten, changed[:5])) + (f" and {len(changed) - 5} more" if len(changed) > 5 else "")
    return f"{short_repr(now)} instead of {short_repr(before)}"
