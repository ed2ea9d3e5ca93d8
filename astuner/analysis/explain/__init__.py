"""`astuner explain`: how the calls of a run became training samples; `astuner bisect`: where two runs differ."""

from astuner.analysis.explain.bisect import bisect
from astuner.analysis.explain.command import explain

__all__ = ["bisect", "explain"]
