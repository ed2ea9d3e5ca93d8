"""Generates tasks from documents and example tasks with an LLM."""

from __future__ import annotations

from astuner.task_sources.data_generation.evaluation import evaluate_rows
from astuner.task_sources.data_generation.generator import GenerationReport, generate_tasks, generation_files

__all__ = ["GenerationReport", "evaluate_rows", "generate_tasks", "generation_files"]
