"""The former import path of `astuner.task_sources.data_generation`."""

from astuner.task_sources.data_generation import generate_tasks

__all__ = ["generate_tasks"]
