"""Named breakpoints: `bp("TAG")` in code, enabled with `astuner --db=TAG`."""

from __future__ import annotations

import bdb
import importlib.util
import os
import sys
import threading
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from astuner.errors import ConfigError


@dataclass(frozen=True)
class Breakpoints:
    """A process's enabled breakpoints: the tags of its `bp(tag)` lines.

    The first stop waits for a debugger on `port` of 127.0.0.1; None stops in the terminal.
    """

    tags: frozenset[str] = frozenset()
    port: int | None = None


class DebuggerQuit(KeyboardInterrupt):
    """Ends the run, because the user quit the debugger in an episode."""


_active = Breakpoints()
_reached: set[str] = set()
_debugger_attached = False
_attach_lock = threading.Lock()


def bp(tag: str) -> None:
    """Stop in the debugger, as `breakpoint()` does, if `--db` names `tag`; otherwise do nothing.

    pdb and editors based on debugpy stop at the next line of the caller. Another debugger, set by `PYTHONBREAKPOINT`,
    stops at the end of this function; one step leads to the caller. In a training backbone the first stop waits until
    a debugger attaches to `debug.debugger_port`. After the debugger has detached, later breakpoints are ignored.
    """
    if _active.tags:
        _reached.add(tag)
    if tag in _active.tags:
        _stop(sys._getframe(1))


def enable_tags(text: str) -> None:
    """Enable the breakpoints with the tags in `text`, such as `TAG1|TAG2`; `ConfigError` if `text` holds no tag."""
    global _active  # noqa: PLW0603 breakpoints belong to the whole process
    tags = frozenset(part.strip() for part in text.split("|")) - {""}
    if not tags:
        raise ConfigError(f"--db={text!r} names no tag; write --db=TAG for the lines `bp('TAG')`, or --db='TAG1|TAG2'")
    _active = replace(_active, tags=tags)


def set_debugger_port(port: int) -> None:
    """Make enabled breakpoints wait for a debugger on this port of 127.0.0.1, for processes without a terminal.

    Raises:
        ConfigError: If breakpoints are enabled and debugpy is not installed.
    """
    global _active  # noqa: PLW0603 breakpoints belong to the whole process
    if not _active.tags or _attached_pydevd() is not None:
        return
    if importlib.util.find_spec("debugpy") is None:
        raise ConfigError(
            "--db in a training backbone needs debugpy, which is not installed; run: pip install debugpy, "
            "or use --backbone=debug, which stops in the terminal"
        )
    _active = replace(_active, port=port)


def active_breakpoints() -> Breakpoints:
    """Return the enabled breakpoints, to be passed to a worker process."""
    return _active


def set_breakpoints(breakpoints: Breakpoints) -> None:
    """Enable the breakpoints of the parent process in this worker process."""
    global _active  # noqa: PLW0603 breakpoints belong to the whole process
    _active = breakpoints


def reached_tags() -> frozenset[str]:
    """Return the tags that this process has reached."""
    return frozenset(_reached)


def add_reached_tags(tags: frozenset[str]) -> None:
    """Add the tags that a worker process has reached."""
    _reached.update(tags)


def describe_missed_tags() -> str | None:
    """Return a message about the enabled tags that the run has not reached, or None if it has reached all."""
    missed = _active.tags - _reached
    if not missed:
        return None
    others = f"reached were: {', '.join(sorted(_reached))}" if _reached else "no line bp('TAG') was reached at all"
    return f"--db: no line bp({', '.join(map(repr, sorted(missed)))}) was reached; {others}"


def is_debugged() -> bool:
    """Return whether a debugger may stop this process: through `--db`, an editor, or pdb.

    Deadlines do not apply in a debugged process, because they would include the time spent at breakpoints.
    """
    tracer = getattr(sys.gettrace(), "__self__", None)
    return bool(_active.tags) or _attached_pydevd() is not None or isinstance(tracer, bdb.Bdb)


def _stop(frame: FrameType) -> None:
    if _active.port is not None:
        _wait_for_debugger(_active.port)
    # The debugger's own hook would stop in this function instead of `bp`'s caller.
    pydevd = _attached_pydevd()
    if pydevd is not None:
        pydevd.settrace(suspend=True, trace_only_current_thread=True, patch_multiprocessing=False, stop_at_frame=frame)
    elif _active.port is not None:
        return  # The debugger has detached.
    elif sys.breakpointhook is sys.__breakpointhook__ and os.environ.get("PYTHONBREAKPOINT", "") in (
        "",
        "pdb.set_trace",
    ):
        import pdb

        pdb.Pdb().set_trace(frame)
    else:
        sys.breakpointhook()


def _wait_for_debugger(port: int) -> None:
    """Wait at the first stop until a debugger has attached; other threads that stop wait, too."""
    global _debugger_attached  # noqa: PLW0603 a debugger attaches to the whole process
    with _attach_lock:
        if _debugger_attached:
            return
        import debugpy
        from loguru import logger

        try:
            host, bound_port = debugpy.listen(("127.0.0.1", port))
        except RuntimeError:  # Another process holds the port.
            host, bound_port = debugpy.listen(("127.0.0.1", 0))
        logger.warning(
            "process {} waits at a breakpoint for a debugger: attach one to {}:{} (in VS Code with `Attach to a run` "
            "of the launch.json that `astuner init` writes)",
            os.getpid(),
            host,
            bound_port,
        )
        debugpy.wait_for_client()
        _debugger_attached = True


def _attached_pydevd() -> Any:
    """Return pydevd, the debugger inside debugpy, if an editor is connected to this process, else None.

    Loaded modules are no evidence of a connection: a Jupyter kernel always loads them.
    """
    debugpy: Any = sys.modules.get("debugpy")
    return sys.modules.get("pydevd") if debugpy is not None and debugpy.is_client_connected() else None
