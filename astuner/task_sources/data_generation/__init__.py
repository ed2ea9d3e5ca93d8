"""Generates tasks from documents and example tasks with an LLM."""

from __future__ import annotations

from astuner.task_sources.data_generation.generator import GenerationReport, generate_tasks, generation_files
from astuner.task_sources.data_generation.questions import evaluate_rows

__all__ = ["GenerationReport", "evaluate_rows", "generate_tasks", "generation_files"]
