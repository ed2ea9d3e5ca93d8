"""Reads training and validation tasks from files, Hugging Face data sets and classes of the user, and filters them."""

from __future__ import annotations

from astuner.task_reader.reader import describe_left_out, read_tasks
from astuner.task_reader.task_reader_base import BaseTaskReader

__all__ = ["BaseTaskReader", "describe_left_out", "read_tasks"]
