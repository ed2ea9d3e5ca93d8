"""Settings of the process and its threads that code can change: how each is read and restored."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import gc
import io
import json
import locale
import logging
import multiprocessing
import os
import pathlib
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
from dataclasses import dataclass
from functools import partial
from io import FileIO
from types import ModuleType
from typing import Any, TypeVar

from astuner.debugging.breakpoints import is_debugged

T = TypeVar("T")

# The record and the log use these.
_URGENT: tuple[ModuleType | type, ...] = (
    builtins, io, json, json.encoder, json.decoder, os, os.path, pathlib.Path, time, random,
)  # fmt: skip
# An episode may replace some of these for its own duration (`socket.socket`, for a proxy).
_OTHER: tuple[ModuleType, ...] = (select, shutil, socket, subprocess, tempfile, threading)
_HOOKS = ("excepthook", "unraisablehook", "displayhook", "tracebacklimit")
_SIGNALS = tuple(
    getattr(signal, f"SIG{name}")
    for name in ("INT", "TERM", "HUP", "QUIT", "PIPE", "USR1", "USR2", "CHLD", "ALRM", "VTALRM", "PROF")
)
_LIMITS = {name: getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_OF_TIME_ZONE = ("timezone", "altzone", "daylight", "tzname")  # these follow the environment variable TZ


@dataclass(frozen=True)
class ProcessSetting:
    """One setting: the functions that read and restore it, and whether a change must be restored immediately."""

    read: Callable[[], Any]
    restore: Callable[[Any], object]
    is_urgent: bool = False


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


def _attributes(owner: ModuleType | type, names: Sequence[str] = (), *, is_urgent: bool = False) -> ProcessSetting:
    """Return the setting for some attributes in a module or class, by default all. Those added later are ignored."""
    public = (name for name in list(vars(owner)) if not name.startswith("_") or name == "__import__")
    names = names or [name for name in public if name not in _OF_TIME_ZONE]

    def restore(values: dict[str, object]) -> None:
        for name, value in values.items():
            if vars(owner).get(name) is not value:
                setattr(owner, name, value)

    read = _read_if_changed(lambda: vars(owner), lambda: {name: vars(owner).get(name) for name in names})
    return ProcessSetting(read, restore, is_urgent)


def _modules() -> ProcessSetting:
    """Return the setting of the imported modules: those that are later removed, replaced or None."""
    # A copy, because other threads import modules meanwhile.
    earlier = {name: module for name, module in sys.modules.copy().items() if module is not None}

    def changed() -> dict[str, object]:
        if earlier.items() <= sys.modules.items():  # fast: thousands of modules
            return {}
        return dict.fromkeys((name for name in earlier if sys.modules.get(name) is not earlier[name]), "changed")

    def restore(_: object) -> None:
        sys.modules.update({name: earlier[name] for name in changed()})

    return ProcessSetting(_read_if_changed(lambda: sys.modules, changed), restore, is_urgent=True)


def _warning_filters() -> ProcessSetting:
    """Return the setting for the warning filters: removed filters, and new ones that raise errors.

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

    def restore(_: object) -> None:
        added = [entry for entry in filters() if entry[0] != "error" and entry not in earlier]
        warnings.resetwarnings()  # also invalidates the cached decisions
        warnings.filters[:] = added + earlier  # type: ignore[index]

    return ProcessSetting(read, restore)


def _garbage_collector() -> ProcessSetting:
    def restore(values: tuple[bool, tuple[int, int, int], int]) -> None:
        (gc.enable if values[0] else gc.disable)()
        gc.set_threshold(*values[1])
        gc.set_debug(values[2])

    return ProcessSetting(lambda: (gc.isenabled(), gc.get_threshold(), gc.get_debug()), restore)


def _start_method() -> ProcessSetting:
    """Return the setting of multiprocessing's start method. Its first use selects the default method."""
    earlier = multiprocessing.get_start_method(allow_none=True)
    default = multiprocessing.get_all_start_methods()[0]
    return ProcessSetting(
        lambda: multiprocessing.get_start_method(allow_none=True) or default,
        lambda _: multiprocessing.set_start_method(earlier, force=True),
    )


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


def _stack_size() -> int:
    """Return the stack size of threads. Reading it sets it to 0, so it is set again."""
    size = threading.stack_size()
    threading.stack_size(size)
    return size


def _removable(values: Callable[[], list[Any]]) -> ProcessSetting:
    """Return the setting of a list's items. Items that are added later, and the order, are ignored."""
    earlier = list(values())

    def restore(_: object) -> None:
        current = values()
        current[:] = [*(item for item in earlier if item not in current), *current]

    return ProcessSetting(lambda: [item for item in earlier if item in values()], restore)


def _running_timers() -> list[bool]:
    return [signal.getitimer(timer)[0] > 0 for timer in _TIMERS]


def _stop_timers(earlier: list[bool]) -> None:
    for timer, was_running in zip(_TIMERS, earlier, strict=True):
        if not was_running:
            signal.setitimer(timer, 0.0)


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


def _trace(read: Callable[[], Any], restore: Callable[[Any], object]) -> ProcessSetting:
    """Return the setting of a trace or profile function, which a debugger may change."""
    earlier = read()
    return ProcessSetting(lambda: earlier if is_debugged() else read(), restore)


def process_settings(in_main_thread: bool) -> dict[str, ProcessSetting]:
    """Return the settings that all threads share, by name. Only the main thread can restore signal handlers."""
    settings = {}
    for owner in (*_URGENT, *_OTHER):
        name = f"class pathlib.{owner.__name__}" if isinstance(owner, type) else f"module {owner.__name__}"
        settings[name] = _attributes(owner, is_urgent=owner in _URGENT)
    settings |= {  # after the functions that the following ones call
        "the recursion limit": ProcessSetting(sys.getrecursionlimit, sys.setrecursionlimit, is_urgent=True),
        "imported modules": _modules(),
        "the switch interval": ProcessSetting(sys.getswitchinterval, sys.setswitchinterval),
        "the limit of digits": ProcessSetting(sys.get_int_max_str_digits, sys.set_int_max_str_digits),
        "the working directory": ProcessSetting(os.getcwd, os.chdir),
        # `_data` is the dict of encoded names and values, which is faster to compare.
        "the environment": ProcessSetting(
            _read_if_changed(lambda: getattr(os.environ, "_data", os.environ), _variables), _environment
        ),
        "the garbage collector": _garbage_collector(),
        "the socket timeout": ProcessSetting(socket.getdefaulttimeout, socket.setdefaulttimeout),
        "the locale": ProcessSetting(
            lambda: locale.setlocale(locale.LC_ALL), lambda value: locale.setlocale(locale.LC_ALL, value)
        ),
        "the level of logging": ProcessSetting(lambda: logging.root.level, logging.root.setLevel),
        "logging.disable": ProcessSetting(lambda: logging.root.manager.disable, logging.disable),
        "the handlers of logging": _removable(lambda: logging.root.handlers),
        "the filters of warnings": _warning_filters(),
        "the resource limits": ProcessSetting(_limits, _restore_limits),
        "the mask of new files": ProcessSetting(_umask, lambda mask: None if mask is None else os.umask(mask)),
        "the stack size of threads": ProcessSetting(_stack_size, threading.stack_size),
        "the trace function of threads": _trace(threading.gettrace, threading.settrace),
        "the profile function of threads": _trace(threading.getprofile, threading.setprofile),
        "asyncio's event loop policy": ProcessSetting(asyncio.get_event_loop_policy, asyncio.set_event_loop_policy),
        "multiprocessing's start method": _start_method(),
        "sys.path": _removable(lambda: sys.path),
        "sys.meta_path": _removable(lambda: sys.meta_path),
        "sys.path_hooks": _removable(lambda: sys.path_hooks),
        # An alarm without a handler ends the process.
        "a timer": ProcessSetting(_running_timers, _stop_timers),
        "module sys": _attributes(sys, _HOOKS),
    }
    if in_main_thread:  # other threads cannot install handlers
        handlers = lambda: {number: signal.getsignal(number) for number in _SIGNALS}  # noqa: E731
        settings["signal handlers"] = ProcessSetting(handlers, _signal_handlers, is_urgent=True)
    return settings | _torch_settings()


def _torch_settings() -> dict[str, ProcessSetting]:
    torch: Any = sys.modules.get("torch")
    if not hasattr(torch, "set_default_dtype"):  # only a run that uses PyTorch has it
        return {}
    settings = {
        "torch's default dtype": ProcessSetting(torch.get_default_dtype, torch.set_default_dtype, is_urgent=True),
        "torch's deterministic algorithms": ProcessSetting(
            torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms
        ),
        "torch's precision of float32 products": ProcessSetting(
            torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
        ),
        "torch's anomaly detection": ProcessSetting(torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    }
    for name in ("benchmark", "deterministic"):
        read, restore = partial(getattr, torch.backends.cudnn, name), partial(setattr, torch.backends.cudnn, name)
        settings[f"torch.backends.cudnn.{name}"] = ProcessSetting(read, restore)
    return settings


def thread_settings() -> dict[str, ProcessSetting]:
    """Return the settings of the calling thread, by name. The thread runs other episodes later."""
    settings = {
        "the trace function": _trace(sys.gettrace, sys.settrace),
        "the profile function": _trace(sys.getprofile, sys.setprofile),
        "the blocked signals": ProcessSetting(
            lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()),
            lambda numbers: signal.pthread_sigmask(signal.SIG_SETMASK, numbers),
        ),
    }
    if hasattr(os, "sched_getaffinity"):  # Linux
        settings["the processors of the thread"] = ProcessSetting(
            lambda: os.sched_getaffinity(0), lambda processors: os.sched_setaffinity(0, processors)
        )
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "set_default_dtype"):
        settings["torch's gradient mode"] = ProcessSetting(torch.is_grad_enabled, torch.set_grad_enabled)
        settings["torch's number of threads"] = ProcessSetting(torch.get_num_threads, torch.set_num_threads)
        settings["torch's default device"] = ProcessSetting(
            lambda: str(torch.get_default_device()),
            # A default device, even the default "cpu", slows every operation.
            lambda device: torch.set_default_device(None if device == "cpu" else device),
        )
    return settings


def read_setting(setting: ProcessSetting) -> Any:
    """Return the value of a setting; None if it cannot be read."""
    try:
        return setting.read()
    except (OSError, ValueError, RuntimeError):  # for example, the working directory is gone
        return None


def restore_setting(setting: ProcessSetting, value: Any) -> None:
    """Restore a setting, unless the system rejects it."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # for example, the working directory is gone
        setting.restore(value)
