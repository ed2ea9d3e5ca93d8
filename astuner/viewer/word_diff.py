"""Differences of two texts by words, with a bound on the time for long texts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher

Piece = tuple[int, str]
"""0 for a part that both texts have, 1 for a part that only this text has; and the part."""

# A word with the white space after it.
_WORD = re.compile(r"\w+\s*|[^\w\s]\s*|\s+")
# `SequenceMatcher` takes time in proportion to the product of the lengths: half a second for 2,000 by 2,000 words.
_MAX_PRODUCT = 4_000_000


class DiffBudget:
    """Bounds the work of many comparisons. Texts beyond the bound are compared by lines or not at all."""

    def __init__(self, products: int = 2 * _MAX_PRODUCT) -> None:
        self._left = products

    def take(self, left: int, right: int) -> bool:
        """Return whether two sequences of these lengths may be compared, and count them if so."""
        product = left * right
        if product > min(self._left, _MAX_PRODUCT):
            return False
        self._left -= product
        return True


def word_diff(left: str, right: str, budget: DiffBudget) -> tuple[list[Piece], list[Piece]]:
    """Return the pieces of two texts.

    The pieces of each text add up to it. Lines are compared first, then the words of the lines that differ. Parts that
    exceed the budget are marked as different as a whole.
    """
    pieces: tuple[list[Piece], list[Piece]] = ([], [])
    for same, old, new in _blocks(left.splitlines(keepends=True), right.splitlines(keepends=True), budget):
        if same:
            _append(pieces, 0, old, new)
            continue
        for is_equal, old_words, new_words in _blocks(_WORD.findall("".join(old)), _WORD.findall("".join(new)), budget):
            _append(pieces, 0 if is_equal else 1, old_words, new_words)
    return pieces


def _blocks(
    left: Sequence[str], right: Sequence[str], budget: DiffBudget
) -> list[tuple[bool, Sequence[str], Sequence[str]]]:
    """Return runs of equal items, and runs in which the items differ."""
    start = _common(left, right)
    end = _common(left[start:][::-1], right[start:][::-1])
    old, new = left[start : len(left) - end], right[start : len(right) - end]
    blocks = [(True, left[:start], right[:start])]
    if not old or not new or not budget.take(len(old), len(new)):
        blocks.append((False, old, new))
    else:
        for tag, a, b, c, d in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
            blocks.append((tag == "equal", old[a:b], new[c:d]))
    return [*blocks, (True, left[len(left) - end :], right[len(right) - end :])]


def _common(left: Sequence[str], right: Sequence[str]) -> int:
    """Return the number of equal items at the start."""
    return next((place for place, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]),
                min(len(left), len(right)))  # fmt: skip


def _append(pieces: tuple[list[Piece], list[Piece]], kind: int, old: Sequence[str], new: Sequence[str]) -> None:
    for side, items in zip(pieces, (old, new), strict=True):
        text = "".join(items)
        if text and side and side[-1][0] == kind:
            side[-1] = (kind, side[-1][1] + text)
        elif text:
            side.append((kind, text))
