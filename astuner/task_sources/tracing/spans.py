"""OpenTelemetry spans with the semantic conventions for generative AI, in OTLP JSON and in Studio's database.

Sources: https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/ and gen-ai-events/ (attributes and events),
https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding (OTLP JSON), and the entity `SpanTable` of AgentScope
Studio 1.x (table `span_table`; its columns `attributes` and `events` contain JSON).
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from astuner.errors import TaskDataError, short_repr
from astuner.schema import Message
from astuner.task_sources.tracing.trace import (
    Feedback,
    Trace,
    TracedConversation,
    TraceProblem,
    not_extended,
    read_messages,
    read_rating,
    read_tools,
)

_CHAT_OPERATIONS = ("chat", "text_completion", "generate_content")
_EVALUATION = "gen_ai.evaluation.result"
_DETAILS = "gen_ai.client.inference.operation.details"
_STUDIO_COLUMNS = ("traceId", "spanId", "parentSpanId", "name", "startTimeUnixNano", "endTimeUnixNano", "attributes")


@dataclass(frozen=True, slots=True)
class Span:
    """The fields of a span that matter for training data.

    Attributes:
        where: its position in the source.
        trace_id, span_id, parent_id: its ids; the parent of a root span is "".
        start, end: nanoseconds since the epoch.
        attributes: by dotted name.
        events: name and attributes.
    """

    where: str
    trace_id: str
    span_id: str
    parent_id: str
    name: str
    start: int
    end: int
    attributes: Mapping[str, Any]
    events: tuple[tuple[str, Mapping[str, Any]], ...] = field(default=())


def otlp_spans(where: str, document: Mapping[str, Any]) -> Iterator[Span]:
    """Yield the spans of an OTLP JSON message (`resourceSpans`); `TraceProblem` if the message is not valid."""
    try:
        for resource in document["resourceSpans"]:
            for scope in resource.get("scopeSpans", ()):
                for span in scope.get("spans", ()):
                    events = [(str(e.get("name", "")), _attributes(e)) for e in span.get("events", ())]
                    yield Span(
                        f"{where}, span {span['spanId']}",
                        str(span["traceId"]),
                        str(span["spanId"]),
                        str(span.get("parentSpanId") or ""),
                        str(span.get("name", "")),
                        int(span.get("startTimeUnixNano", 0)),
                        int(span.get("endTimeUnixNano", 0)),
                        _attributes(span),
                        tuple(events),
                    )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise TraceProblem(f"not OTLP JSON: {type(error).__name__}: {error}") from error


def _attributes(holder: Mapping[str, Any]) -> dict[str, Any]:
    return {item["key"]: _any_value(item.get("value") or {}) for item in holder.get("attributes", ())}


def _any_value(value: Mapping[str, Any]) -> Any:
    for type_name, content in value.items():
        match type_name:
            case "intValue":  # a string, as JSON numbers have 53 bits
                return int(content)
            case "arrayValue":
                return [_any_value(item) for item in content.get("values", ())]
            case "kvlistValue":
                return {item["key"]: _any_value(item.get("value") or {}) for item in content.get("values", ())}
            case _:
                return content
    return None


def studio_spans(path: Path) -> list[Span]:
    """Return the spans of AgentScope Studio's database, which may be in use.

    Raises:
        TaskDataError: the file is not such a database.
    """
    try:
        # Studio may write to the file. A reader of a database in WAL mode needs to write to its shared memory.
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            database.row_factory = sqlite3.Row
            columns = {row["name"] for row in database.execute("PRAGMA table_info(span_table)")}
            if missing := [name for name in _STUDIO_COLUMNS if name not in columns]:
                raise TaskDataError(
                    f"{path}: the table span_table has no column {', '.join(missing)}; expected a database of "
                    "AgentScope Studio 1.x, such as ~/AgentScope-Studio/database.sqlite"
                )
            rows = database.execute("SELECT * FROM span_table ORDER BY startTimeUnixNano, spanId").fetchall()
    except sqlite3.Error as error:
        raise TaskDataError(f"{path}: cannot be read as an SQLite database: {error}") from error
    return [_studio_span(row, path) for row in rows]


def _studio_span(row: sqlite3.Row, path: Path) -> Span:
    where = f"span {row['spanId']}"
    try:
        events = json.loads(row["events"] or "[]") if "events" in row.keys() else []  # noqa: SIM118
        return Span(
            where,
            str(row["traceId"]),
            str(row["spanId"]),
            str(row["parentSpanId"] or ""),
            str(row["name"]),
            int(row["startTimeUnixNano"]),
            int(row["endTimeUnixNano"]),
            dict(_flat(json.loads(row["attributes"]))),
            tuple((str(e.get("name", "")), dict(_flat(e.get("attributes") or {}))) for e in events),
        )
    except (ValueError, TypeError, AttributeError) as error:
        raise TaskDataError(f"{path}: {where} cannot be read: {error}") from error


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield attributes by dotted name; Studio stores them nested (before its release 1.0.6) or by dotted name."""
    for name, value in tree.items():
        yield prefix + name, value
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")


def traces_of(spans: Iterable[Span]) -> tuple[list[Trace], dict[str, list[str]]]:
    """Return the traces that the spans form, ordered by time, and the places of invalid chat spans by reason.

    A chat span (`gen_ai.operation.name`) is an LLM call. Events `gen_ai.evaluation.result` in any of a trace's spans
    are its feedback. Traces without a chat span with messages are left out.
    """
    by_trace: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda span: (span.end, span.start)):
        by_trace.setdefault(span.trace_id, []).append(span)
    traces, problems = [], dict[str, list[str]]()
    for trace_id, members in by_trace.items():
        agents = {span.span_id: span for span in members}
        conversations: list[TracedConversation] = []
        feedback = Feedback()
        for span in members:
            try:
                feedback = feedback.merged(_feedback(span))
                if span.attributes.get("gen_ai.operation.name") in _CHAT_OPERATIONS:
                    conversations.append(_conversation(span, agents))
            except TraceProblem as problem:
                problems.setdefault(str(problem), []).append(span.where)
        if conversations:
            start = min(span.start for span in members) / 1e9
            traces.append(Trace(trace_id, not_extended(conversations), feedback, start))
    return sorted(traces, key=lambda trace: (trace.start_time, trace.trace_id)), problems


def _conversation(span: Span, members: Mapping[str, Span]) -> TracedConversation:
    attributes = dict(span.attributes)
    for name, details in span.events:
        attributes |= details if name == _DETAILS else {}
    answer = _json(attributes.get("gen_ai.output.messages"))
    request = _json(attributes.get("gen_ai.input.messages"))
    if request is None:
        # AgentScope's chat spans have the messages as arguments of the model's call.
        called = _json(attributes.get("agentscope.function.input"))
        called = called if isinstance(called, Mapping) else {}
        args = called.get("args") or []
        request = args[0] if args else (called.get("kwargs") or {}).get("messages")
    if request is None or answer is None:
        raise TraceProblem(
            "the chat span has no messages; enable the recording of content in the instrumentation "
            "(gen_ai.input.messages and gen_ai.output.messages)"
        )
    if not isinstance(answer, list) or len(answer) != 1:
        raise TraceProblem(f"gen_ai.output.messages is {short_repr(answer)}; expected one message")
    messages = [*_openai_messages(request), *_openai_messages(answer)]
    if system := _json(attributes.get("gen_ai.system_instructions")):
        parts = system if isinstance(system, list) else [system]
        messages = [*_openai_messages([{"role": "system", "parts": parts}]), *messages]
    read_messages(messages, "the chat span")
    parent = members.get(span.parent_id)
    agent = parent.attributes.get("gen_ai.agent.name") if parent else None
    tools = read_tools(_json(attributes.get("gen_ai.tool.definitions")))
    return TracedConversation(tuple(messages), tools, str(agent or attributes.get("gen_ai.request.model") or ""))


def _openai_messages(messages: Any) -> list[Message]:
    """Convert messages with `parts` to OpenAI's format; messages with `content` are in it."""
    if not isinstance(messages, list):
        raise TraceProblem(f"the messages are {short_repr(messages)}; expected a list")
    converted: list[Message] = []
    for message in messages:
        if not isinstance(message, Mapping) or "parts" not in message:
            converted += read_messages([message], "the chat span")
            continue
        parts = [part if isinstance(part, Mapping) else {"type": "text", "content": part} for part in message["parts"]]
        texts, thoughts, calls = [], [], []
        for part in parts:
            match part.get("type"):
                case "text":
                    texts.append(str(part.get("content", "")))
                case "reasoning":
                    thoughts.append(str(part.get("content", "")))
                case "tool_call":
                    arguments = part.get("arguments")
                    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
                    function = {"name": str(part.get("name") or ""), "arguments": text}
                    calls.append({"id": str(part.get("id") or ""), "type": "function", "function": function})
                case "tool_call_response":
                    response = part.get("response", part.get("result", ""))
                    text = response if isinstance(response, str) else json.dumps(response, ensure_ascii=False)
                    converted.append({"role": "tool", "tool_call_id": str(part.get("id") or ""), "content": text})
                case other:
                    raise TraceProblem(f"a message has a part of type {short_repr(other)}; only text is supported")
        if texts or thoughts or calls:
            role = message.get("role") or "assistant"
            optional = {"reasoning_content": "\n".join(thoughts), "tool_calls": calls}
            kept = {name: value for name, value in optional.items() if value}
            converted.append({"role": role, "content": "\n".join(texts), **kept})
    return converted


def _feedback(span: Span) -> Feedback:
    """Return a span's evaluations; the explanation of the evaluation `edit` is a corrected answer."""
    feedback = Feedback()
    for name, attributes in span.events:
        if name != _EVALUATION:
            continue
        text = str(attributes.get("gen_ai.evaluation.explanation") or "")
        if attributes.get("gen_ai.evaluation.name") == "edit":
            feedback = feedback.merged(Feedback(edit=text))
            continue
        score = attributes.get("gen_ai.evaluation.score.value", attributes.get("gen_ai.evaluation.score.label"))
        feedback = feedback.merged(Feedback(read_rating(score), comment=text))
    return feedback


def _json(value: Any) -> Any:
    """Return a value whose JSON may be encoded as a string."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise TraceProblem(f"an attribute is not JSON: {error}") from error
