"""Reads traces from deployed agents, with their users' feedback, and converts them to training data."""

from __future__ import annotations

from astuner.tracing.convert import TARGETS, Conversion, Target, convert
from astuner.tracing.reader import SOURCE_KINDS, TraceFile, read_traces
from astuner.tracing.trace import Feedback, Trace, TracedConversation
from astuner.tracing.training_files import import_traces, tracing_files

__all__ = [
    "SOURCE_KINDS",
    "TARGETS",
    "Conversion",
    "Feedback",
    "Target",
    "Trace",
    "TraceFile",
    "TracedConversation",
    "convert",
    "import_traces",
    "read_traces",
    "tracing_files",
]
