"""`astuner explain`: how the calls of a run became training samples; `astuner bisect`: where two runs differ."""

from astuner.explain.bisect import bisect
from astuner.explain.command import explain

__all__ = ["bisect", "explain"]
