"""Converts rows to tasks: finds the fields, assigns stable ids, and describes invalid rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, timedelta
from datetime import time as datetime_time
from decimal import Decimal
from hashlib import blake2b
from typing import Any

from astuner.config.data import FieldMapping
from astuner.errors import TaskDataError, short_repr, shorten
from astuner.schema import Message, Task

_ID_FIELDS = ("task_id", "id")
_QUESTION_FIELDS = ("main_query", "question", "query", "problem", "prompt", "instruction", "input")
_MESSAGE_FIELDS = ("init_messages", "messages")
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


@dataclass(frozen=True, slots=True)
class DatasetRow:
    """One row of a split.

    Attributes:
        where: its position in the source, for example `line 4`.
        content: the parsed value; a valid row is a dict.
        problem: why the row could not be parsed; "" if it could.
    """

    where: str
    content: object = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class DatasetSplit:
    """One split's rows, and the name of their source for messages."""

    source: str
    rows: Iterable[DatasetRow]


class _RowError(Exception):
    """A row is not a valid task; the message is the reason."""


@dataclass(frozen=True, slots=True)
class _ParsedRow:
    """A valid row, and its task, whose id may get a suffix because of the other rows."""

    where: str
    content: Mapping[str, Any]
    row_id: str | None
    task: Task


def make_tasks(
    split: DatasetSplit, fields: FieldMapping, *, transcripts: bool
) -> tuple[list[Task], dict[str, list[str]]]:
    """Convert the rows of a split to tasks, in the same order.

    A task has the id of its row. If the row has no id, it is a hash of the row's content (BLAKE2b of its JSON
    with sorted keys); the second of equal rows gets the suffix `-2`, and so on. `metadata` has all fields except the id
    and the messages.

    Args:
        fields: the names of the fields; see `FieldMapping` for the defaults.
        transcripts: the rows are conversations for supervised training (see `read_tasks`).

    Returns:
        The tasks, and the places of the invalid rows by the reason why they are invalid.

    Raises:
        TaskDataError: different rows have the same id.
    """
    parsed_rows: list[_ParsedRow] = []
    problems: dict[str, list[str]] = {}
    for row in split.rows:
        try:
            parsed_rows.append(_parse_row(row, fields, transcripts))
        except _RowError as problem:
            problems.setdefault(str(problem), []).append(row.where)
    ids = _unique_ids(parsed_rows, split.source)
    return [replace(row.task, task_id=task_id) for task_id, row in zip(ids, parsed_rows, strict=True)], problems


def checked_tasks(items: Sequence[object], source: str, *, transcripts: bool) -> list[Task]:
    """Return the tasks that a reader of the user returned, if they are valid.

    Args:
        items: what it returned.
        source: the name of the reader, for messages.
        transcripts: the tasks are conversations for supervised training (see `read_tasks`).

    Raises:
        TaskDataError: an item is no task, a task is invalid, or two have the same id.
    """
    tasks: list[Task] = []
    ids: dict[str, int] = {}
    for number, item in enumerate(items, 1):
        where = f"{source}: item {number}"
        if not isinstance(item, Task):
            raise TaskDataError(f"{where} is {short_repr(item)}; expected an astuner.schema.Task.")
        try:
            if not isinstance(item.task_id, str) or not item.task_id:
                raise _RowError(f"task_id is {short_repr(item.task_id)}; expected a text")
            if not isinstance(item.metadata, Mapping):
                raise _RowError(f"metadata is of type {type(item.metadata).__name__}; expected a mapping")
            messages = _messages(list(item.init_messages), "init_messages")
            if transcripts:
                _check_transcript({**item.metadata, "init_messages": item.init_messages}, "init_messages", messages)
            else:
                _question({"main_query": item.main_query}, FieldMapping(main_query="main_query"))
        except _RowError as problem:
            raise TaskDataError(f"{where}: {problem}.") from None
        if (first := ids.setdefault(item.task_id, number)) != number:
            raise TaskDataError(
                f"{where} has the same task_id {short_repr(item.task_id)} as item {first}; make the ids unique."
            )
        tasks.append(item)
    return tasks


def _parse_row(row: DatasetRow, fields: FieldMapping, transcripts: bool) -> _ParsedRow:
    if row.problem:
        raise _RowError(row.problem)
    content = row.content
    if not isinstance(content, dict):
        raise _RowError(f"is of type {type(content).__name__}; expected an object with named fields")
    id_field = _field(content, fields.task_id, _ID_FIELDS)
    message_field = _field(content, fields.init_messages, _MESSAGE_FIELDS)
    messages = _messages(content[message_field], message_field) if message_field else ()
    if transcripts:
        _check_transcript(content, message_field, messages)
        question = ""
    else:
        question = _question(content, fields)
    row_id = _row_id(content[id_field], id_field) if id_field else None
    metadata = {name: value for name, value in content.items() if name not in (id_field, message_field)}
    return _ParsedRow(row.where, content, row_id, Task(row_id or _hash(content), question, messages, metadata))


def _field(content: Mapping[str, Any], configured: str | None, defaults: Sequence[str]) -> str | None:
    """Return the configured field name, or else the first default that has a value."""
    if configured is None:
        return next((name for name in defaults if content.get(name) is not None), None)
    if configured not in content:
        raise _RowError(f"no field {short_repr(configured)}; its fields are {_names(content)}")
    return configured


def _question(content: Mapping[str, Any], fields: FieldMapping) -> str:
    name = _field(content, fields.main_query, _QUESTION_FIELDS)
    if name is None:
        raise _RowError(
            f"no question: none of {', '.join(_QUESTION_FIELDS)} has a value; its fields are {_names(content)}"
            " (set fields.main_query to the name of the field)"
        )
    value = content[name]
    if not isinstance(value, str):
        raise _RowError(
            f"field {short_repr(name)} is of type {type(value).__name__}; expected the question as a string"
        )
    if not value.strip():
        raise _RowError(f"field {short_repr(name)} is empty; expected the question")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON allows but tokenizers do not
        raise _RowError(f"field {short_repr(name)} is not valid Unicode at character {error.start + 1}") from error
    return value


def _row_id(value: object, name: str) -> str | None:
    if value is None or value == "":  # an empty cell
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise _RowError(
            f"field {short_repr(name)} is {short_repr(value)}; expected the id as a string or a whole number"
        )
    return str(value)


def _messages(value: object, name: str) -> tuple[Message, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise _RowError(f"field {short_repr(name)} is of type {type(value).__name__}; expected a list of chat messages")
    return tuple(_message(message, f"field {short_repr(name)}, message {n}") for n, message in enumerate(value, 1))


def _message(value: object, where: str) -> Message:
    if not isinstance(value, dict):
        raise _RowError(f"{where}, is of type {type(value).__name__}; expected an object with role and content")
    if value.get("role") not in _ROLES:
        raise _RowError(f"{where}, has the role {short_repr(value.get('role'))}; expected one of {', '.join(_ROLES)}")
    content = value.get("content")
    if content is None and not value.get("tool_calls"):
        raise _RowError(f"{where}, has neither content nor tool_calls")
    if not isinstance(content, str | list | None):
        raise _RowError(f"{where}, has content of type {type(content).__name__}; expected a string or a list")
    # Columnar formats add to each message the keys of all other messages, with the value None.
    return {key: item for key, item in value.items() if item is not None or key == "content"}


def _check_transcript(content: Mapping[str, Any], message_field: str | None, messages: Sequence[Message]) -> None:
    if message_field is None:
        raise _RowError(f"no transcript: no field messages; its fields are {_names(content)}")
    answers = [message for message in messages if message["role"] == "assistant"]
    for answer in answers:
        if (weight := answer.get("weight", 1)) not in (0, 1):
            raise _RowError(f"an assistant message has the weight {short_repr(weight)}; expected 1, or 0 for context")
    if not any(answer.get("weight", 1) for answer in answers):
        raise _RowError(f"field {short_repr(message_field)} has no assistant message to train on")
    tools = content.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise _RowError(f"field 'tools' is {short_repr(tools)}; expected a list of tool descriptions")


def _unique_ids(rows: Sequence[_ParsedRow], source: str) -> list[str]:
    first_with_id: dict[str, _ParsedRow] = {}
    for row in rows:
        if row.row_id is None:
            continue
        other = first_with_id.setdefault(row.row_id, row)
        if other.content != row.content:
            raise TaskDataError(
                f"{source}: {other.where} and {row.where} differ but have the same id {short_repr(row.row_id)}."
                " Make the ids unique, or set fields.task_id to another field."
            )
    used = set(first_with_id)
    last_number: dict[str, int] = {}
    ids = []
    for row in rows:
        number = last_number.get(row.task.task_id, 0) + 1
        task_id = row.task.task_id if number == 1 else f"{row.task.task_id}-{number}"
        has_reserved_id = row.row_id is not None and number == 1
        while task_id in used and not has_reserved_id:
            number += 1
            task_id = f"{row.task.task_id}-{number}"
        last_number[row.task.task_id] = number
        used.add(task_id)
        ids.append(task_id)
    return ids


def _hash(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), default=_stable_text)
    return blake2b(text.encode(), digest_size=8).hexdigest()


def _stable_text(value: Any) -> str:
    """Return a text, the same in every run, for a value of a type that JSON does not have."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, date | datetime_time | timedelta | Decimal):
        return str(value)
    raise _RowError(
        f"no id can be derived from a value of type {type(value).__name__}; set fields.task_id to a field with ids"
    )


def _names(content: Mapping[str, Any]) -> str:
    return shorten(", ".join(map(str, content)), 1000) or "none"
