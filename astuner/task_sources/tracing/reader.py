"""Reads traces: recognises the kind of a source, reads it, and adds feedback from a further file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from loguru import logger

from astuner.errors import RecordError, TaskDataError
from astuner.run_record.episode_file import read_episode
from astuner.run_record.episodes import read_index
from astuner.run_record.folder import is_record
from astuner.task_reader.dataset_file import json_rows
from astuner.task_reader.reader import describe_problems
from astuner.task_reader.tasks import DatasetRow
from astuner.task_sources.tracing.spans import Span, otlp_spans, studio_spans, traces_of
from astuner.task_sources.tracing.trace import (
    Feedback,
    Trace,
    TracedConversation,
    TraceProblem,
    not_extended,
    read_feedback,
    read_messages,
    read_tools,
)

SourceKind = Literal["studio", "otlp", "chat_log", "run_record"]
SOURCE_KINDS: tuple[SourceKind, ...] = ("studio", "otlp", "chat_log", "run_record")
_ID_FIELDS = ("trace_id", "custom_id", "id")


@dataclass(frozen=True, slots=True)
class TraceFile:
    """The traces of a source.

    Attributes:
        traces: from spans and run records they are ordered by time, otherwise as in the file.
        skipped: the number of rows, spans and episodes that cannot be read.
        unmatched: the number of feedback rows whose trace is not there.
    """

    kind: SourceKind
    traces: tuple[Trace, ...]
    skipped: int = 0
    unmatched: int = 0


def read_traces(source: Path, feedback: Path | None = None, *, skip_bad_rows: bool = False) -> TraceFile:
    """Read the traces of a source.

    Args:
        source: AgentScope Studio's `database.sqlite`, a file with OTLP JSON or with chats in OpenAI's format, or a
            run's folder.
        feedback: a file of JSON lines with `trace_id` and `rating`, `edit` or `comment`.
        skip_bad_rows: skip, log and count invalid rows and spans instead of raising an error.

    Raises:
        TaskDataError: the source does not exist or is of no known kind, or has invalid rows.
    """
    problems: dict[str, list[str]]
    if is_record(source):
        kind, traces, problems, rows = "run_record", *_episodes(source), list[DatasetRow]()
    elif not source.is_file():
        raise TaskDataError(f"{source} is neither a file nor the folder of a run.")
    else:
        with source.open("rb") as file:
            is_database = file.read(16) == b"SQLite format 3\0"
        rows = [] if is_database else list(json_rows(source))
        if is_database:
            kind, (traces, problems) = "studio", traces_of(studio_spans(source))
        elif any(isinstance(row.content, dict) and "resourceSpans" in row.content for row in rows):
            kind, (traces, problems), rows = "otlp", _otlp(rows), []
        else:
            kind, (traces, problems, rows) = "chat_log", _chats(rows)
    unmatched = 0
    for lines in (rows, json_rows(feedback) if feedback else ()):
        traces, missing = _with_feedback(traces, lines, problems)
        unmatched += missing
    skipped = sum(map(len, problems.values()))
    if skipped:
        summary = describe_problems(problems)
        if not skip_bad_rows:
            raise TaskDataError(f"{source}: {skipped} rows cannot be read:{summary}\nFix them, or skip bad rows.")
        logger.warning("{}: {} rows cannot be read:{}\nThey are skipped.", source, skipped, summary)
    if unmatched:
        logger.warning("{}: feedback on {} unknown traces is left out", source, unmatched)
    return TraceFile(kind, tuple(traces), skipped, unmatched)  # type: ignore[arg-type]


def _otlp(rows: Iterable[DatasetRow]) -> tuple[list[Trace], dict[str, list[str]]]:
    spans: list[Span] = []
    problems: dict[str, list[str]] = {}
    for row in rows:
        try:
            if row.problem or not isinstance(row.content, dict):
                raise TraceProblem(row.problem or "not OTLP JSON")
            # Exporters write other signals (resourceLogs, resourceMetrics) to the same file.
            spans += otlp_spans(row.where, row.content) if "resourceSpans" in row.content else ()
        except TraceProblem as problem:
            problems.setdefault(str(problem), []).append(row.where)
    traces, more = traces_of(spans)
    return traces, problems | more


def _chats(rows: Iterable[DatasetRow]) -> tuple[list[Trace], dict[str, list[str]], list[DatasetRow]]:
    """Return the traces of a chat log, the invalid rows, and the rows that have feedback only."""
    traces: dict[str, Trace] = {}
    problems: dict[str, list[str]] = {}
    feedback: list[DatasetRow] = []
    for row in rows:
        try:
            if row.problem or not isinstance(row.content, dict):
                raise TraceProblem(row.problem or f"is of type {type(row.content).__name__}; expected an object")
            if not row.content.keys() & {"messages", "request", "body", "response", "choices"}:
                feedback.append(row)
                continue
            trace = _chat(row.content)
            if (earlier := traces.get(trace.trace_id)) is not None:
                # Several calls with one trace_id are calls of one agent.
                conversations = not_extended((*earlier.conversations, *trace.conversations))
                both = earlier.feedback.merged(trace.feedback)
                trace = replace(earlier, conversations=conversations, feedback=both)
            traces[trace.trace_id] = trace
        except TraceProblem as problem:
            problems.setdefault(str(problem), []).append(row.where)
    return list(traces.values()), problems, feedback


def _chat(row: Mapping[str, Any]) -> Trace:
    """Return the trace in a row: `messages`, or `request` and `response` of the Chat Completions API."""
    request = row.get("request") or row.get("body") or row
    response = row.get("response") or (row if "choices" in row else None)
    if isinstance(response, Mapping) and isinstance(response.get("body"), Mapping):  # OpenAI's batch format
        response = response["body"]
    if not isinstance(request, Mapping) or not isinstance(response, Mapping | None):
        raise TraceProblem("request and response are not objects")
    messages = read_messages(request.get("messages"), "messages")
    start = row.get("created") or (response or {}).get("created") or 0
    if response is not None:
        choices = response.get("choices")
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], Mapping):
            raise TraceProblem("the response has not exactly one choice")
        messages += read_messages([choices[0].get("message")], "the answer")
    if messages[-1]["role"] != "assistant":
        raise TraceProblem("the last message is not an answer of the assistant")
    default = hashlib.blake2b(json.dumps(messages, sort_keys=True).encode(), digest_size=8).hexdigest()
    ids = [holder.get(name) for holder in (row, response or {}) for name in _ID_FIELDS]
    trace_id = str(next((value for value in ids if value), default))
    model = str((response or {}).get("model") or request.get("model") or "")
    conversation = TracedConversation(tuple(messages), read_tools(request.get("tools")), model)
    return Trace(trace_id, (conversation,), read_feedback(row), float(start) if isinstance(start, int | float) else 0.0)


def _episodes(run: Path) -> tuple[list[Trace], dict[str, list[str]]]:
    """Return the episodes of a run with a reward as traces; their rating is the reward."""
    traces, problems = [], dict[str, list[str]]()
    for entry in read_index(run):
        if entry.reward is None:
            continue
        try:
            episode = read_episode(run / entry.path)
        except RecordError as error:
            problems.setdefault(str(error), []).append(f"episode {entry.episode_id}")
            continue
        calls = [call for call in episode.calls if call.messages and not call.cut]
        conversations = not_extended(TracedConversation(call.messages, (), call.agent_name) for call in calls)
        if conversations:
            feedback = Feedback(rating=episode.reward)
            metadata = dict(episode.task.metadata)
            traces.append(Trace(episode.episode_id, conversations, feedback, episode.start_time, metadata))
    return traces, problems


def _with_feedback(
    traces: Iterable[Trace], rows: Iterable[DatasetRow], problems: dict[str, list[str]]
) -> tuple[list[Trace], int]:
    by_id = {trace.trace_id: trace for trace in traces}
    unmatched = 0
    for row in rows:
        try:
            content = row.content
            if row.problem or not isinstance(content, dict) or not content.get("trace_id"):
                raise TraceProblem(row.problem or "is neither a chat (messages) nor feedback (trace_id and rating)")
            given = read_feedback(content)
            if given == Feedback():
                raise TraceProblem("is feedback without rating, edit and comment")
            if (trace := by_id.get(str(content["trace_id"]))) is None:
                unmatched += 1
            else:
                by_id[trace.trace_id] = trace.with_feedback(given)
        except TraceProblem as problem:
            problems.setdefault(str(problem), []).append(row.where)
    return list(by_id.values()), unmatched
