"""A process's settings that an episode can change, so that later episodes in the process would differ."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import gc
import io
import itertools
import json
import locale
import logging
import multiprocessing
import os
import pathlib
import pickle
import random
import re
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from io import FileIO
from types import ModuleType
from typing import Any, ClassVar, TypeVar

from astuner.debugging.breakpoints import is_debugged
from astuner.errors import short_repr, shorten

T = TypeVar("T")
Reader = Callable[[], Any]

_MODULES: tuple[ModuleType | type, ...] = (
    asyncio, builtins, io, json, json.encoder, json.decoder, os, os.path, pathlib.Path, pickle, random,
    select, shutil, socket, subprocess, tempfile, threading, time,
)  # fmt: skip
_LIBRARIES = ("numpy", "orjson")
"""Libraries of astuner whose functions agents replace, for example to simulate an error."""
_HOOKS = ("excepthook", "unraisablehook", "displayhook", "tracebacklimit")
_STREAMS = ("stdin", "stdout", "stderr")
_SIGNALS = tuple(
    getattr(signal, f"SIG{name}")
    for name in ("INT", "TERM", "HUP", "QUIT", "PIPE", "USR1", "USR2", "CHLD", "ALRM", "VTALRM", "PROF")
)
_LIMITS = {name: getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_OF_TIME_ZONE = ("timezone", "altzone", "daylight", "tzname")  # these follow the environment variable TZ


class ProcessSettings:
    """The settings of this process and its main thread. Used in the main thread."""

    _shared_modules: ClassVar[tuple[str, ...]] = ()
    _shared_count: ClassVar[int] = 0

    @classmethod
    def share_modules(cls) -> None:
        """Prepare this process for forks that read their settings.

        Of the modules that are imported now, the forks check only those without a dot in their name. A process that
        looks at a module copies the page of memory that has the module's reference count: 20 MB for all modules.
        """
        cls._shared_modules = tuple(name for name in sys.modules if "." not in name)
        cls._shared_count = len(sys.modules)

    def __init__(self) -> None:
        self._readers: dict[str, Reader] = {}
        self._values: dict[str, Any] = {}

    def read(self) -> None:
        """Read the settings, with which `changes` compares."""
        self._readers = self._readers or _readers() | {"imported modules": self._modules()}
        if "torch's default dtype" not in self._readers:  # an earlier episode may have imported it
            self._readers |= _torch_readers()
        self._values = {name: _value(read) for name, read in self._readers.items()}

    def changes(self) -> tuple[str, ...]:
        """Return a description of each setting that has changed since `read`."""
        values = {name: (self._values[name], _value(read)) for name, read in self._readers.items()}
        return tuple(f"{name}: {_difference(before, now)}" for name, (before, now) in values.items() if now != before)

    def _modules(self) -> Reader:
        """Return the reader of the imported modules that were later removed, replaced or None."""
        later = itertools.islice(reversed(sys.modules), max(0, len(sys.modules) - self._shared_count))
        earlier = {name: sys.modules.get(name) for name in (*self._shared_modules, *later)}

        def changed() -> dict[str, object]:
            gone = (name for name, module in earlier.items() if module and sys.modules.get(name) is not module)
            return dict.fromkeys(gone, "changed")

        return changed


def _value(read: Reader) -> Any:
    try:
        return read()
    except (OSError, ValueError, RuntimeError):  # for example, the working directory is gone
        return None


def _difference(before: Any, now: Any) -> str:
    """Describe a change; of a mapping, the keys that changed, because the values may be secrets."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = [str(key) for key in {**before, **now} if before.get(key) is not now.get(key)]
        changed = sorted(key for key in keys if before.get(key) != now.get(key)) or sorted(keys)
        return ", ".join(map(shorten, changed[:5])) + (f" and {len(changed) - 5} more" if len(changed) > 5 else "")
    return f"{short_repr(now)} instead of {short_repr(before)}"


def _read_if_changed(source: Callable[[], Mapping[Any, Any]], read: Callable[[], T]) -> Callable[[], T]:
    """Return a function with the result of `read`, which is called again only if the mapping `source()` has changed.

    Two mappings of the same objects are compared ten times as fast as one is read, and every episode compares them.
    """
    known: Mapping[Any, Any] | None = None
    values: list[T] = []

    def read_if_changed() -> T:
        nonlocal known
        current = source()
        if known is None or known != current:
            known = dict(current)  # before `read`, so that a later change is detected by the next call
            values[:] = [read()]
        return values[0]

    return read_if_changed


def _attributes(owner: ModuleType | type, names: Sequence[str] = ()) -> Reader:
    """Return the reader of some attributes in a module or class, by default all. Those added later are ignored."""
    public = (name for name in list(vars(owner)) if not name.startswith("_") or name == "__import__")
    names = names or [name for name in public if name not in _OF_TIME_ZONE]
    return _read_if_changed(lambda: vars(owner), lambda: {name: vars(owner).get(name) for name in names})


def _warning_filters() -> Reader:
    """Return the reader of the warning filters: removed filters, and new ones that raise errors.

    Libraries add others when they are imported, which may happen in an episode.
    """
    filters: Callable[[], list[Any]] = lambda: list(warnings.filters)  # noqa: E731
    earlier = filters()

    def read() -> list[str]:
        now = filters()
        if now == earlier:
            return []
        removed = [f"removed {entry[0]!r}" for entry in earlier if entry not in now]
        return removed + [f"added {entry[0]!r}" for entry in now if entry[0] == "error" and entry not in earlier]

    return read


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("ASTUNER_")}


def _umask() -> int | None:
    """Return the mask of new files; None where it cannot be read without setting it, which other threads would see."""
    with contextlib.suppress(OSError), FileIO("/proc/self/status") as status:
        if match := re.search(rb"^Umask:\s*([0-7]+)", status.read(), re.MULTILINE):
            return int(match[1], 8)
    return None


def _stack_size() -> int:
    """Return the stack size of threads. Reading it sets it to 0, so it is set again."""
    size = threading.stack_size()
    threading.stack_size(size)
    return size


def _items(values: Callable[[], list[Any]]) -> Reader:
    """Return the reader of a list's items. Items that are added later, and the order, are ignored."""
    earlier = list(values())
    return lambda: [item for item in earlier if item in values()]


def _trace(read: Reader) -> Reader:
    """Return the reader of a trace or profile function, which a debugger may change."""
    earlier = read()
    return lambda: earlier if is_debugged() else read()


def _stream(name: str, earlier: object) -> str:
    """Describe a standard stream; an episode may close it or replace it."""
    stream = getattr(sys, name, None)
    if getattr(stream, "closed", False):
        return "closed"
    return "stream of the run" if stream is earlier else type(stream).__name__


def _file_id(fd: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _readers() -> dict[str, Reader]:
    readers: dict[str, Reader] = {}
    libraries = [sys.modules[name] for name in _LIBRARIES if name in sys.modules]
    for owner in (*_MODULES, *libraries):
        name = f"class pathlib.{owner.__name__}" if isinstance(owner, type) else f"module {owner.__name__}"
        readers[name] = _attributes(owner)
    start_method = multiprocessing.get_all_start_methods()[0]  # its first use selects the default method
    readers |= {
        "the recursion limit": sys.getrecursionlimit,
        "the switch interval": sys.getswitchinterval,
        "the limit of digits": sys.get_int_max_str_digits,
        "the working directory": os.getcwd,
        # `_data` is the dict of encoded names and values, which is faster to compare.
        "the environment": _read_if_changed(lambda: getattr(os.environ, "_data", os.environ), _variables),
        "the garbage collector": lambda: (gc.isenabled(), gc.get_threshold(), gc.get_debug()),
        "the socket timeout": socket.getdefaulttimeout,
        "the locale": lambda: locale.setlocale(locale.LC_ALL),
        "the level of logging": lambda: logging.root.level,
        "logging.disable": lambda: logging.root.manager.disable,
        "the handlers of logging": _items(lambda: logging.root.handlers),
        "the filters of warnings": _warning_filters(),
        "the resource limits": lambda: {name: resource.getrlimit(number) for name, number in _LIMITS.items()},
        "the mask of new files": _umask,
        "the stack size of threads": _stack_size,
        "the trace function of threads": _trace(threading.gettrace),
        "the profile function of threads": _trace(threading.getprofile),
        "the trace function": _trace(sys.gettrace),
        "the profile function": _trace(sys.getprofile),
        "asyncio's event loop policy": asyncio.get_event_loop_policy,
        "multiprocessing's start method": lambda: multiprocessing.get_start_method(allow_none=True) or start_method,
        "sys.path": _items(lambda: sys.path),
        "sys.meta_path": _items(lambda: sys.meta_path),
        "sys.path_hooks": _items(lambda: sys.path_hooks),
        "a timer": lambda: [signal.getitimer(timer)[0] > 0 for timer in _TIMERS],
        "module sys": _attributes(sys, _HOOKS),
        "signal handlers": lambda: {number: signal.getsignal(number) for number in _SIGNALS},
        "the blocked signals": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()),
    }
    for fd, name in enumerate(_STREAMS):
        readers[f"file descriptor {fd}"] = partial(_file_id, fd)
        readers[f"sys.{name}"] = partial(_stream, name, getattr(sys, name))
    if hasattr(os, "sched_getaffinity"):  # Linux
        readers["the processors of the thread"] = lambda: os.sched_getaffinity(0)
    return readers


def _torch_readers() -> dict[str, Reader]:
    torch: Any = sys.modules.get("torch")
    if not hasattr(torch, "set_default_dtype"):  # only a process that uses PyTorch has it
        return {}
    readers: dict[str, Reader] = {
        "torch's default dtype": torch.get_default_dtype,
        "torch's deterministic algorithms": torch.are_deterministic_algorithms_enabled,
        "torch's precision of float32 products": torch.get_float32_matmul_precision,
        "torch's anomaly detection": torch.is_anomaly_enabled,
        "torch's gradient mode": torch.is_grad_enabled,
        "torch's number of threads": torch.get_num_threads,
        "torch's default device": lambda: str(torch.get_default_device()),
    }
    for name in ("benchmark", "deterministic"):
        readers[f"torch.backends.cudnn.{name}"] = partial(getattr, torch.backends.cudnn, name)
    return readers
