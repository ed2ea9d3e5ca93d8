"""From rows to tasks: which field is which, stable ids, and what is wrong with a row."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from datetime import time as datetime_time
from decimal import Decimal
from hashlib import blake2b
from typing import Any

from astuner.config.data import FieldMapping
from astuner.errors import TaskDataError
from astuner.schema import Message, Task
from astuner.task_reader.rows import Row, Split

_ID_FIELDS = ("task_id", "id")
_QUESTION_FIELDS = ("main_query", "question", "query", "problem", "prompt", "instruction", "input")
_MESSAGE_FIELDS = ("init_messages", "messages")
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class _RowError(Exception):
    """The row is no task; the message says why."""


@dataclass(frozen=True, slots=True)
class _Draft:
    """A task whose final id depends on the other rows."""

    where: str
    content: Mapping[str, Any]
    given_id: str | None
    base_id: str
    main_query: str
    messages: tuple[Message, ...]
    metadata: Mapping[str, Any]


def tasks_of(split: Split, fields: FieldMapping, *, transcripts: bool) -> tuple[list[Task], list[str]]:
    """Make tasks of a split's rows, in their order.

    A task's id is the row's own; without one it is a hash of the row's content (BLAKE2b of its JSON with sorted
    keys), and the second of equal rows gets `-2`, and so on. `metadata` holds every field but the id's and the
    messages'.

    Args:
        split: where the rows come from.
        fields: names of the fields; see `FieldMapping` for what is tried without one.
        transcripts: the rows are whole conversations to imitate, see `read_tasks`.

    Returns:
        The tasks, and one line `{where}: {reason}` for each row that is none.

    Raises:
        TaskDataError: rows that differ carry one id.
    """
    drafts: list[_Draft] = []
    problems: list[str] = []
    for row in split.rows:
        try:
            drafts.append(_draft(row, fields, transcripts))
        except _RowError as problem:
            problems.append(f"{row.where}: {problem}")
    ids = _unique_ids(drafts, split.source)
    tasks = [
        Task(task_id, draft.main_query, draft.messages, draft.metadata)
        for task_id, draft in zip(ids, drafts, strict=True)
    ]
    return tasks, problems


def _draft(row: Row, fields: FieldMapping, transcripts: bool) -> _Draft:
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
    given_id = _given_id(content[id_field], id_field) if id_field else None
    return _Draft(
        where=row.where,
        content=content,
        given_id=given_id,
        base_id=given_id or _hash(content),
        main_query=question,
        messages=messages,
        metadata={name: value for name, value in content.items() if name not in (id_field, message_field)},
    )


def _field(content: Mapping[str, Any], wanted: str | None, usual: Sequence[str]) -> str | None:
    """Name of the field to use: the configured one, else the first usual one that has a value."""
    if wanted is None:
        return next((name for name in usual if content.get(name) is not None), None)
    if wanted not in content:
        raise _RowError(f"no field {wanted!r}; its fields are {_names(content)}")
    return wanted


def _question(content: Mapping[str, Any], fields: FieldMapping) -> str:
    name = _field(content, fields.main_query, _QUESTION_FIELDS)
    if name is None:
        raise _RowError(
            f"no question: none of {', '.join(_QUESTION_FIELDS)} has a value; its fields are {_names(content)}"
            " (name the field under fields.main_query)"
        )
    value = content[name]
    if not isinstance(value, str):
        raise _RowError(f"field {name!r} is of type {type(value).__name__}; expected the question as a string")
    if not value.strip():
        raise _RowError(f"field {name!r} is empty; expected the question")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair: JSON allows it, no tokenizer does
        raise _RowError(f"field {name!r} is no valid Unicode at character {error.start + 1}") from error
    return value


def _given_id(value: object, name: str) -> str | None:
    if value is None or value == "":  # an empty cell
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise _RowError(f"field {name!r} is {value!r}; expected the id as a string or a whole number")
    return str(value)


def _messages(value: object, name: str) -> tuple[Message, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise _RowError(f"field {name!r} is of type {type(value).__name__}; expected a list of chat messages")
    return tuple(_message(message, f"field {name!r}, message {n}") for n, message in enumerate(value, 1))


def _message(value: object, place: str) -> Message:
    if not isinstance(value, dict):
        raise _RowError(f"{place}, is of type {type(value).__name__}; expected an object with role and content")
    if value.get("role") not in _ROLES:
        raise _RowError(f"{place}, has the role {value.get('role')!r}; expected one of {', '.join(_ROLES)}")
    content = value.get("content")
    if content is None and not value.get("tool_calls"):
        raise _RowError(f"{place}, has neither content nor tool_calls")
    if not isinstance(content, str | list | None):
        raise _RowError(f"{place}, has content of type {type(content).__name__}; expected a string or a list")
    # Columnar formats fill each message with every key that any message has.
    return {key: item for key, item in value.items() if item is not None or key == "content"}


def _check_transcript(content: Mapping[str, Any], message_field: str | None, messages: Sequence[Message]) -> None:
    if message_field is None:
        raise _RowError(f"no transcript: no field messages; its fields are {_names(content)}")
    if not any(message["role"] == "assistant" for message in messages):
        raise _RowError(f"field {message_field!r} has no assistant message to learn from")
    tools = content.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise _RowError(f"field 'tools' is {tools!r}; expected a list of tool descriptions")


def _unique_ids(drafts: Sequence[_Draft], source: str) -> list[str]:
    first: dict[str, _Draft] = {}
    for draft in drafts:
        if draft.given_id is None:
            continue
        other = first.setdefault(draft.given_id, draft)
        if other.content != draft.content:
            raise TaskDataError(
                f"{source}: {other.where} and {draft.where} differ but both carry the id {draft.given_id!r}."
                " Give each row an id of its own, or name another field under fields.task_id."
            )
    taken = set(first)
    seen: dict[str, int] = {}
    ids = []
    for draft in drafts:
        number = seen.get(draft.base_id, 0) + 1
        task_id = draft.base_id if number == 1 else f"{draft.base_id}-{number}"
        is_first_given = draft.given_id is not None and number == 1
        while task_id in taken and not is_first_given:
            number += 1
            task_id = f"{draft.base_id}-{number}"
        seen[draft.base_id] = number
        taken.add(task_id)
        ids.append(task_id)
    return ids


def _hash(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), default=_stable)
    return blake2b(text.encode(), digest_size=8).hexdigest()


def _stable(value: Any) -> str:
    """Text of a value that JSON does not know, the same in every run."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, date | datetime_time | timedelta | Decimal):
        return str(value)
    raise _RowError(
        f"a value of type {type(value).__name__} has no stable text to make an id of; name an id field under"
        " fields.task_id"
    )


def _names(content: Mapping[str, Any]) -> str:
    return ", ".join(map(str, content)) or "none"
