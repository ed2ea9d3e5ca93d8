"""`astuner rescore`: scores a recorded run with another judge, without a model, and compares the rewards."""

from astuner.analysis.rescore.command import RescoreOptions, rescore

__all__ = ["RescoreOptions", "rescore"]
