"""Checks of the model's answers for degenerate output, such as endless repetition (`compute_madness_checklist`).

The checks are rules with wide margins, not a language model. `campaigns/anomaly_checks.py` measures how often
they flag normal text, and how much degenerate output they find.
"""

from astuner.model_tuner.anomaly_checks.base import AnomalyCheck, CheckedAnswer
from astuner.model_tuner.anomaly_checks.registry import CHECKS, NONSENSE, find_anomaly

__all__ = ["CHECKS", "NONSENSE", "AnomalyCheck", "CheckedAnswer", "find_anomaly"]
