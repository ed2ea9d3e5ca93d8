"""`astuner explain`: how the calls of a run became training samples, and how many tokens they have."""

from astuner.explain.command import explain

__all__ = ["explain"]
