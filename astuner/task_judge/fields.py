"""Reads the values that a judge needs from a task's metadata and a workflow output's metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from astuner.errors import JudgeError, shorten

if TYPE_CHECKING:
    from astuner.schema import WorkflowOutput, WorkflowTask


def answer_text(workflow_output: WorkflowOutput, key: str, judge: str) -> str:
    """Return the agent's answer, which is `key` in the metadata of the workflow's output; None is an empty text.

    Raises:
        JudgeError: there is no such key, or its value is neither a text nor a number.
    """
    return as_text(field_value(workflow_output.metadata, key, _OUTPUT, judge), key, _OUTPUT)


def task_value(workflow_task: WorkflowTask, key: str, judge: str) -> Any:
    """Return `key` in the metadata of a task.

    Raises:
        JudgeError: there is no such key.
    """
    return field_value(workflow_task.task.metadata, key, of_task(workflow_task), judge)


def of_task(workflow_task: WorkflowTask) -> str:
    """Return the name of a task's metadata for messages."""
    return f"the metadata of task {shorten(workflow_task.task_id)}"


def field_value(metadata: Mapping[str, Any], key: str, owner: str, judge: str) -> Any:
    """Return the value under `key`.

    Raises:
        JudgeError: there is no such key.
    """
    if key not in metadata:
        keys = shorten(", ".join(sorted(map(str, metadata))), 1000) or "none"
        raise JudgeError(f"{owner} has no {key!r}, which {judge} needs. Its keys: {keys}.")
    value = metadata[key]
    return value.item() if getattr(value, "shape", None) == () else value  # numpy scalars


def as_text(value: object, key: str, owner: str) -> str:
    """Return a text or a number as text; None becomes an empty text.

    Raises:
        JudgeError: the value is neither.
    """
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise JudgeError(f"{key!r} in {owner} is of type {type(value).__name__}; expected a string or a number.")
    return str(value)


_OUTPUT = "the workflow's output metadata"
