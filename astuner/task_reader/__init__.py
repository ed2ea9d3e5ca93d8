"""Reads training and validation tasks from files, Hugging Face data sets and classes of the user, and filters them."""

from __future__ import annotations

from astuner.task_reader.reader import BaseTaskReader, describe_left_out, read_tasks

__all__ = ["BaseTaskReader", "describe_left_out", "read_tasks"]
