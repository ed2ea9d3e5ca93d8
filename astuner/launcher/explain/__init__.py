"""`astuner explain`: how the calls of a run became what is trained, and what that cost."""

from astuner.launcher.explain.command import explain

__all__ = ["explain"]
