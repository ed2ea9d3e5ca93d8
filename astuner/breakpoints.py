"""Breakpoints with names, which stop only when they are asked for: `bp("TAG")` and `astuner --db=TAG`."""

from __future__ import annotations

import bdb
import os
import sys
from types import FrameType

from astuner.errors import ConfigError

_chosen: frozenset[str] = frozenset()


def bp(tag: str) -> None:
    """Stop in the debugger, as `breakpoint()` does, if `--db` names `tag`; otherwise do nothing.

    pdb, and editors that use debugpy, stop at the line after, in the caller. Another debugger that `PYTHONBREAKPOINT`
    names stops at the end of this function, from which the next step leads there.
    """
    if tag in _chosen:
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
    _chosen = tags


def any_chosen() -> bool:
    """Whether the run is to stop anywhere."""
    return bool(_chosen)


def is_debugged() -> bool:
    """Whether somebody may stop this process at any line: by `--db`, from an editor, or as it is run under pdb.

    Then time passes that is not the episode's own, so that no deadline holds.
    """
    tracer = getattr(sys.gettrace(), "__self__", None)
    return any_chosen() or "pydevd" in sys.modules or isinstance(tracer, bdb.Bdb)


def _stop(frame: FrameType) -> None:
    # A debugger's own hook would stop in the frame that calls it: ours.
    pydevd = sys.modules.get("pydevd")
    if pydevd is not None:
        pydevd.settrace(suspend=True, trace_only_current_thread=True, patch_multiprocessing=False, stop_at_frame=frame)
    elif sys.breakpointhook is sys.__breakpointhook__ and _python_would_take_pdb():
        import pdb

        pdb.Pdb().set_trace(frame)
    else:
        sys.breakpointhook()


def _python_would_take_pdb() -> bool:
    return os.environ.get("PYTHONBREAKPOINT", "") in ("", "pdb.set_trace")
