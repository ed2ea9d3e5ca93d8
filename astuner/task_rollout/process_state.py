"""Settings of the process that episodes share. Changes by an episode are detected, reported and restored.

Episodes in threads share the process, so the author of a change is known only if no other episode ran. Otherwise, all
episodes that ran are reported. A change that breaks other code immediately, such as a closed stream, is restored when
it is detected. Other changes may be temporary (`contextlib.chdir`). They are restored after the end of all episodes
that may undo them.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import io
import json
import locale
import logging
import os
import random
import re
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from io import FileIO
from types import ModuleType
from typing import Any

from astuner.errors import short_repr, shorten
from astuner.redaction.output import reopened_stream

_MODULES: tuple[ModuleType, ...] = (builtins, io, json, json.encoder, json.decoder, os, os.path, time, random)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD, signal.SIGALRM)
_LIMITS = {name: getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_OF_TIME_ZONE = ("timezone", "altzone", "daylight", "tzname")  # these follow the environment variable TZ
_STREAMS = ("stdin", "stdout", "stderr")


@dataclass(frozen=True)
class _Setting:
    """One setting: the functions that read and restore it, and whether a change must be restored immediately."""

    read: Callable[[], Any]
    restore: Callable[[Any], object]
    is_urgent: bool = False


def _attributes(module: ModuleType) -> _Setting:
    """Return the setting of a module's attributes. Attributes that are added later are ignored."""
    names = [name for name in vars(module) if not name.startswith("_") and name not in _OF_TIME_ZONE]

    def restore(values: dict[str, object]) -> None:
        for name, value in values.items():
            if vars(module).get(name) is not value:
                setattr(module, name, value)

    return _Setting(lambda: {name: vars(module).get(name) for name in names}, restore, is_urgent=True)


def _signal_handlers(handlers: dict[int, Any]) -> None:
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("ASTUNER_")}


def _environment(variables: dict[str, str]) -> None:
    for name in _variables().keys() - variables.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in variables.items() if os.environ.get(name) != value})
    time.tzset()  # `TZ` may have changed


def _umask() -> int | None:
    """Return the mask of new files; None where it cannot be read without setting it, which other threads would see."""
    with contextlib.suppress(OSError), FileIO("/proc/self/status") as status:
        if match := re.search(rb"^Umask:\s*([0-7]+)", status.read(), re.MULTILINE):
            return int(match[1], 8)
    return None


def _removable(values: Callable[[], list[Any]]) -> _Setting:
    """Return the setting of a list's items. Items that are added later, and the order, are ignored."""
    earlier = list(values())

    def restore(_: object) -> None:
        current = values()
        current[:] = [*(item for item in earlier if item not in current), *current]

    return _Setting(lambda: [item for item in earlier if item in values()], restore)


def _running_timers() -> list[bool]:
    return [signal.getitimer(timer)[0] > 0 for timer in _TIMERS]


def _stop_timers(earlier: list[bool]) -> None:
    for timer, was_running in zip(_TIMERS, earlier, strict=True):
        if not was_running:
            signal.setitimer(timer, 0.0)


def _file_id(fd: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _limits() -> dict[str, tuple[int, int]]:
    return {name: resource.getrlimit(number) for name, number in _LIMITS.items()}


def _restore_limits(limits: dict[str, tuple[int, int]]) -> None:
    for name, (soft, hard) in limits.items():
        lowered = resource.getrlimit(_LIMITS[name])[1]
        try:
            resource.setrlimit(_LIMITS[name], (soft, hard))
        except ValueError:  # only root can raise a hard limit
            is_free = lowered == resource.RLIM_INFINITY or 0 <= soft <= lowered
            resource.setrlimit(_LIMITS[name], (soft if is_free else lowered, lowered))


def _settings(in_main_thread: bool) -> dict[str, _Setting]:
    settings = {
        "the recursion limit": _Setting(sys.getrecursionlimit, sys.setrecursionlimit, is_urgent=True),
        "the switch interval": _Setting(sys.getswitchinterval, sys.setswitchinterval),
        "the working directory": _Setting(os.getcwd, os.chdir),
        "the environment": _Setting(_variables, _environment),
        "the garbage collector": _Setting(gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
        "the socket timeout": _Setting(socket.getdefaulttimeout, socket.setdefaulttimeout),
        "the locale": _Setting(lambda: locale.setlocale(locale.LC_ALL), lambda v: locale.setlocale(locale.LC_ALL, v)),
        "the level of logging": _Setting(lambda: logging.root.level, logging.root.setLevel),
        "logging.disable": _Setting(lambda: logging.root.manager.disable, logging.disable),
        "the resource limits": _Setting(_limits, _restore_limits),
        "the mask of new files": _Setting(_umask, lambda mask: None if mask is None else os.umask(mask)),
        "sys.path": _removable(lambda: sys.path),
        "sys.meta_path": _removable(lambda: sys.meta_path),
        "sys.path_hooks": _removable(lambda: sys.path_hooks),
        # An alarm without a handler ends the process.
        "a timer": _Setting(_running_timers, _stop_timers),
    }
    settings |= {f"module {module.__name__}": _attributes(module) for module in _MODULES}
    if in_main_thread:  # other threads cannot install handlers
        handlers = lambda: {number: signal.getsignal(number) for number in _SIGNALS}  # noqa: E731
        settings["signal handlers"] = _Setting(handlers, _signal_handlers, is_urgent=True)
    torch: Any = sys.modules.get("torch")  # only a run that uses PyTorch has it
    if hasattr(torch, "set_default_dtype"):
        settings["torch's default dtype"] = _Setting(torch.get_default_dtype, torch.set_default_dtype, is_urgent=True)
        settings["torch's deterministic algorithms"] = _Setting(
            torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms
        )
    return settings


@dataclass(eq=False)
class RunningMark:
    """A running episode, with the changes that it may have made."""

    effects: list[str] = field(default_factory=list)


_SHARED = " (by this episode or another that ran at the same time)"


class ProcessState:
    """The settings of the process at the start of a batch of episodes. Thread-safe."""

    def __init__(self, *, in_main_thread: bool = False) -> None:
        """Read the settings; `in_main_thread` says whether the episodes run in the main thread."""
        self._lock = threading.Lock()
        self._copies = [None if _file_id(fd) is None else os.dup(fd) for fd in range(3)]
        self._streams = {name: getattr(sys, name) for name in _STREAMS}
        self._settings = _settings(in_main_thread)
        for name in _STREAMS:
            self._settings[f"sys.{name}"] = _Setting(
                partial(self._stream_type, name), partial(self._put_stream_back, name)
            )
        for fd, copy in enumerate(self._copies):
            if copy is not None:
                self._settings[f"file descriptor {fd}"] = _Setting(partial(_file_id, fd), partial(_redirect, copy, fd))
        self._values = {name: _read(setting) for name, setting in self._settings.items()}
        self._running: set[RunningMark] = set()
        self._waiting: dict[str, set[RunningMark]] = {}
        self._is_closed = False

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
        with self._lock:
            self._running.add(mark)
        try:
            yield mark
        finally:
            self.check()
            with self._lock:
                self._running.discard(mark)
                self._restore_changes_of(mark)

    def check(self) -> None:
        """Detect changes, and restore the urgent ones."""
        with self._lock:
            if self._is_closed:
                return
            changes = self._restore_streams()
            for name, setting in self._settings.items():
                before, now = self._values[name], _read(setting)
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
        """Restore the changes whose possible authors have all ended. The episode of `mark` is the last of them."""
        for name, authors in list(self._waiting.items()):
            if not self._is_closed and not authors & self._running:
                del self._waiting[name]
                before, now = self._values[name], _read(self._settings[name])
                self._restore(name)
                shared = "" if authors == {mark} else _SHARED
                mark.effects.append(f"{name}: {_difference(before, now)}{shared}")

    def _restore(self, name: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # for example, the working directory is gone
            self._settings[name].restore(self._values[name])

    def _stream_type(self, name: str) -> str:
        """Return the type of a standard stream that an episode has replaced (`contextlib.redirect_stdout`)."""
        stream = getattr(sys, name, None)
        return "stream of the run" if stream is self._streams[name] else type(stream).__name__

    def _put_stream_back(self, name: str, _: object) -> None:
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


def _redirect(copy: int, fd: int, _: object = None) -> None:
    os.dup2(copy, fd)


def _read(setting: _Setting) -> Any:
    try:
        return setting.read()
    except (OSError, ValueError):  # for example, the working directory is gone
        return None


def _difference(before: Any, now: Any) -> str:
    """Describe a change; of a mapping, the keys that changed, because the values may be secrets."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = [str(key) for key in {**before, **now} if before.get(key) is not now.get(key)]
        changed = sorted(key for key in keys if before.get(key) != now.get(key)) or sorted(keys)
        return ", ".join(map(shorten, changed[:5])) + (f" and {len(changed) - 5} more" if len(changed) > 5 else "")
    return f"{short_repr(now)} instead of {short_repr(before)}"
