"""`astuner rescore`: judges a recorded run anew, without a model, and compares the rewards."""

from astuner.rescore.command import RescoreOptions, rescore

__all__ = ["RescoreOptions", "rescore"]
