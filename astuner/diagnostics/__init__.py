"""Checks for faults that raise no error. A finding says what is wrong, with the evidence, and how to fix it."""

from astuner.diagnostics.evidence import StartEvidence, StepEvidence, UpdateEvidence
from astuner.diagnostics.fork_fixes import fix_for, fixes_for
from astuner.diagnostics.logprob_gap import TokenPairs, explain_logprob_gap
from astuner.diagnostics.monitor import Monitor
from astuner.diagnostics.registry import Check, all_checks, checks_of

__all__ = [
    "Check",
    "Monitor",
    "StartEvidence",
    "StepEvidence",
    "TokenPairs",
    "UpdateEvidence",
    "all_checks",
    "checks_of",
    "explain_logprob_gap",
    "fix_for",
    "fixes_for",
]
