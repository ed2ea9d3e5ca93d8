"""How many examples a property test tries: few in each run of the tests, the full number in `.ci/nightly`."""

from __future__ import annotations

import os

FEW = 10
FULL = 100
"""That of a test without a number of its own."""
NIGHTLY = os.environ.get("ASTUNER_HYPOTHESIS") == "nightly"


def examples(full: int) -> int:
    """Return `full` in the nightly tests, and at most `FEW` otherwise, for `@settings(max_examples=...)`."""
    return full if NIGHTLY else min(full, FEW)
