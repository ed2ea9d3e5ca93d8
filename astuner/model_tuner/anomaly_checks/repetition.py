"""Text that repeats without end."""

from __future__ import annotations

import zlib

import numpy as np

from astuner.model_tuner.anomaly_checks.base import AnomalyCheck, CheckedAnswer

# English and code compress to 0.2–0.6 of their size; text that repeats without end compresses much further. A table of
# numbers or signs may compress as far, so a text of few letters is left to the search for blocks.
_MIN_BYTES = 400
_MAX_REPETITIVE_RATIO = 0.06
_MIN_LETTERS = 0.3

# A block of text with at least this many consecutive repetitions is not a refrain. The last may be cut off.
_MIN_REPEATS = 8
_MIN_REPEATED_CHARS = 60
_LONGEST_PERIOD = 400
# Digits, signs or one letter may be a number, a rule or a row of a matrix, so they must repeat for longer, in one line.
_MIN_REPEATED_SIGNS = 2000
_LONGEST_PERIOD_OF_SIGNS = 8


class Repetition(AnomalyCheck):
    """Finds answers that end in copies of one block, and answers that compress like endless repetition."""

    name = "repetition"

    def find(self, answer: CheckedAnswer) -> str | None:
        """Return a fault if the answer repeats itself."""
        return _compresses_too_far(answer.text) or _repeated_block(answer.text)


def _compresses_too_far(text: str) -> str | None:
    encoded = text.encode(errors="replace")
    if len(encoded) < _MIN_BYTES:
        return None
    ratio = len(zlib.compress(encoded)) / len(encoded)
    if ratio >= _MAX_REPETITIVE_RATIO or sum(map(str.isalpha, text)) < _MIN_LETTERS * len(text):
        return None
    return f"repeats itself (compresses to {ratio:.1%})"


def _repeated_block(text: str) -> str | None:
    """Return a fault if a text ends in copies of one block, as an answer that loops does."""
    tail = text.rstrip()[-_LONGEST_PERIOD * (_MIN_REPEATS + 1) :]
    codes = np.frombuffer(tail.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    for period in range(1, min(_LONGEST_PERIOD, len(codes) // (_MIN_REPEATS - 1)) + 1):
        differences = np.flatnonzero(codes[period:] != codes[:-period])
        length = len(codes) - (int(differences[-1]) + 1 if len(differences) else 0)
        block = tail[-period:]
        if len({char for char in block.lower() if char.isalpha()}) >= 2:
            least = max((_MIN_REPEATS - 1) * period + 1, _MIN_REPEATED_CHARS)
        elif period <= _LONGEST_PERIOD_OF_SIGNS and "\n" not in block:
            least = _MIN_REPEATED_SIGNS
        else:
            continue
        if length >= least:
            return f"repeats itself ({length // period} times {block.strip()[:60]!r})"
    return None
