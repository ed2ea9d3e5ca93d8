"""Breakpoints with names, which stop only when they are asked for: `bp("TAG")` and `astuner --db=TAG`."""

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
    """Where a process is to stop, and how.

    Attributes:
        tags: those of the lines `bp(tag)` at which it stops.
        port: of 127.0.0.1, where the first stop waits for a debugger; None stops in the terminal.
    """

    tags: frozenset[str] = frozenset()
    port: int | None = None


_chosen = Breakpoints()
_reached: set[str] = set()
_waited = False
_listening = threading.Lock()


def bp(tag: str) -> None:
    """Stop in the debugger, as `breakpoint()` does, if `--db` names `tag`; otherwise do nothing.

    pdb, and editors that use debugpy, stop at the line after, in the caller. Another debugger that `PYTHONBREAKPOINT`
    names stops at the end of this function, from which the next step leads there. In a training backbone the first
    stop waits until a debugger attaches to `debug.debugger_port`; once it has left, the run goes on by itself.
    """
    if _chosen.tags:
        _reached.add(tag)
    if tag in _chosen.tags:
        _stop(sys._getframe(1))


def choose_tags(text: str) -> None:
    """Stop from now on at the tags of `text`, `TAG1|TAG2`.

    Raises:
        ConfigError: it holds no tag.
    """
    global _chosen  # noqa: PLW0603 a process is debugged as a whole
    tags = frozenset(part.strip() for part in text.split("|")) - {""}
    if not tags:
        raise ConfigError(f"--db={text!r} names no tag; write --db=TAG for the lines `bp('TAG')`, or --db='TAG1|TAG2'")
    _chosen = replace(_chosen, tags=tags)


def stop_through_port(port: int) -> None:
    """Let the chosen tags wait for a debugger at this port of 127.0.0.1: where there is no terminal to stop in.

    Raises:
        ConfigError: tags are chosen, and debugpy is not installed.
    """
    global _chosen  # noqa: PLW0603 a process is debugged as a whole
    if not _chosen.tags or _editors_debugger() is not None:
        return
    if importlib.util.find_spec("debugpy") is None:
        raise ConfigError(
            "--db stops a training backbone through a debugger's port, which needs debugpy, not installed here; run: "
            "pip install debugpy, or use --backbone=debug, which stops in the terminal"
        )
    _chosen = replace(_chosen, port=port)


def chosen() -> Breakpoints:
    """Return where this process is to stop, for a process that runs a part of its work."""
    return _chosen


def choose(breakpoints: Breakpoints) -> None:
    """Stop where another process, whose work this one does, is to."""
    global _chosen  # noqa: PLW0603 a process is debugged as a whole
    _chosen = breakpoints


def reached() -> frozenset[str]:
    """Return the tags that this process has come to, for the one whose work it does."""
    return frozenset(_reached)


def count_as_reached(tags: frozenset[str]) -> None:
    """Take tags that another process has come to for reached."""
    _reached.update(tags)


def any_chosen() -> bool:
    """Whether the run is to stop anywhere."""
    return bool(_chosen.tags)


def why_nothing_stopped() -> str | None:
    """Say which chosen tags the run has not come to; None where it came to all of them."""
    missed = _chosen.tags - _reached
    if not missed:
        return None
    others = f"reached were: {', '.join(sorted(_reached))}" if _reached else "no line bp('TAG') was reached at all"
    return f"--db: no line bp({', '.join(map(repr, sorted(missed)))}) was reached; {others}"


def is_debugged() -> bool:
    """Whether somebody may stop this process at any line: by `--db`, from an editor, or as it is run under pdb.

    Then time passes that is not the episode's own, so that no deadline holds.
    """
    tracer = getattr(sys.gettrace(), "__self__", None)
    return any_chosen() or _editors_debugger() is not None or isinstance(tracer, bdb.Bdb)


def _stop(frame: FrameType) -> None:
    if _chosen.port is not None:
        _wait_for_debugger(_chosen.port)
    # A debugger's own hook would stop in the frame that calls it: ours.
    pydevd = _editors_debugger()
    if pydevd is not None:
        pydevd.settrace(suspend=True, trace_only_current_thread=True, patch_multiprocessing=False, stop_at_frame=frame)
    elif _chosen.port is not None:
        return  # the debugger has left
    elif sys.breakpointhook is sys.__breakpointhook__ and _python_would_take_pdb():
        import pdb

        pdb.Pdb().set_trace(frame)
    else:
        sys.breakpointhook()


def _wait_for_debugger(port: int) -> None:
    """Wait until a debugger has attached, the first time only; other threads' stops wait with it."""
    global _waited  # noqa: PLW0603 a process is debugged as a whole
    with _listening:
        if _waited:
            return
        import debugpy
        from loguru import logger

        try:
            place = debugpy.listen(("127.0.0.1", port))
        except RuntimeError:  # another process of this run, or somebody else's, has the port
            place = debugpy.listen(("127.0.0.1", 0))
        logger.warning(
            "process {} waits at a breakpoint for a debugger: attach one to {}:{} (in VS Code by `Attach to a run` of "
            "the launch.json that `astuner init` writes)",
            os.getpid(),
            *place,
        )
        debugpy.wait_for_client()
        _waited = True


def _editors_debugger() -> Any:
    """Return pydevd, on which debugpy builds, if an editor is connected to this process by debugpy, else None.

    That they are loaded means nothing: a Jupyter kernel loads them for whoever may want them.
    """
    debugpy: Any = sys.modules.get("debugpy")
    return sys.modules.get("pydevd") if debugpy is not None and debugpy.is_client_connected() else None


def _python_would_take_pdb() -> bool:
    return os.environ.get("PYTHONBREAKPOINT", "") in ("", "pdb.set_trace")
