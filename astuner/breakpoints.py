"""Breakpoints with names, which stop only when they are asked for: `bp("TAG")` and `astuner --db=TAG`."""

from __future__ import annotations

import sys

from astuner.errors import ConfigError

_chosen: frozenset[str] = frozenset()


def bp(tag: str) -> None:
    """Stop in the debugger, as `breakpoint()` does, if `--db` names `tag`; otherwise do nothing.

    The debugger stops at the end of this function: the next step, or `up`, leads to the line that called it.
    """
    if tag in _chosen:
        sys.breakpointhook()


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
