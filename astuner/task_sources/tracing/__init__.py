"""Reads traces from deployed agents, with their users' feedback, and converts them to training data."""

from __future__ import annotations

from astuner.task_sources.tracing.convert import TARGETS, Conversion, Target, convert
from astuner.task_sources.tracing.reader import SOURCE_KINDS, TraceFile, read_traces
from astuner.task_sources.tracing.trace import Feedback, Trace, TracedConversation
from astuner.task_sources.tracing.training_files import import_traces, tracing_files

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
