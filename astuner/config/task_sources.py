"""Sections on tasks that are made from other data: `task_reader.feedback_tracing`."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from astuner.config.section import Number, Section, key


def _optional_function(path: str | None) -> str | None:
    if path is not None and "->" not in path:
        raise ValueError("a function, `package.module->function`")
    return path


OptionalFunction = Annotated[str | None, AfterValidator(_optional_function)]
ValidationShare = Annotated[float, Field(ge=0, lt=1)]


class FeedbackTracingConfig(Section):
    """`task_reader.feedback_tracing`: tasks or transcripts from the traces of a deployed agent."""

    base_url: str = key("database.sqlite", resume="path")
    """The traces: AgentScope Studio's database, OTLP JSON, chats in OpenAI's format, or the folder of a run, or
    `package.module->function` that returns the path."""
    feedback_path: str | None = key(None, resume="path")
    """A file of JSON lines with `trace_id` and `rating`, `edit` or `comment`; null for none."""
    train_output_path: str = key("feedback_tracing/training.jsonl", resume="path")
    """The file to which the training rows are written."""
    validation_output_path: str = key("feedback_tracing/validation.jsonl", resume="path")
    """The file to which the validation rows are written."""
    validation_share: ValidationShare = 0.1
    """Share of the rows that are for validation; 0 for none."""
    min_rating: Number | None = None
    """Leave out traces with a lower rating or without one, unless the answer was edited; null keeps all."""
    redact: OptionalFunction = None
    """`package.module->function` that takes a text and returns it without personal data; null changes no text."""
    skip_bad_rows: bool = False
    """Skip and count rows, spans and episodes that cannot be read, instead of stopping at them."""
