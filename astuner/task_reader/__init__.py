"""Reads training and validation tasks from files and Hugging Face data sets."""

from __future__ import annotations

from astuner.task_reader.reader import read_tasks

__all__ = ["read_tasks"]
