"""What a source of tasks yields, before anyone asks what its fields mean."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a split.

    Attributes:
        where: its place in the source, e.g. `line 4`.
        content: what was read there; an object (a dict) if the row is sound.
        problem: why nothing could be read, else "".
    """

    where: str
    content: object = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Split:
    """The rows of one split, and the name of their source for messages."""

    source: str
    rows: Iterable[Row]
