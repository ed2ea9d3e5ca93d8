"""Converts traces to tasks, transcripts for supervised training or preference pairs, and writes them to files."""

from __future__ import annotations

import contextlib
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from loguru import logger

from astuner.config.data import DatasetFileConfig, DatasetFileSplit
from astuner.config.task_sources import FeedbackTracingConfig
from astuner.errors import AstunerError, TaskDataError, short_repr
from astuner.helper_llm.client import LlmClient
from astuner.plugin import load_function, raised_at
from astuner.run_record.files import dump_json, write_atomically
from astuner.schema import Message
from astuner.system.redaction.redactor import redact as remove_secrets
from astuner.task_reader.dataset_file import find_path, path_from_function
from astuner.task_reader.reader import describe_left_out
from astuner.task_sources.data_generation import evaluate_rows
from astuner.task_sources.tracing.reader import read_traces
from astuner.task_sources.tracing.trace import Feedback, Trace, TracedConversation, message_keys

Target = Literal["tasks", "sft", "preferences"]
TARGETS: tuple[Target, ...] = ("tasks", "sft", "preferences")


@dataclass(frozen=True, slots=True)
class Conversion:
    """The rows that traces were converted to.

    Attributes:
        rows: the rows, as values of JSON.
        left_out: the number of traces that are not in the rows, by cause.
    """

    rows: tuple[Mapping[str, Any], ...]
    left_out: Mapping[str, int]


def convert(traces: Sequence[Trace], target: Target, *, min_rating: float | None = None) -> Conversion:
    """Convert traces to rows of training data.

    An answer that the user has edited is replaced by the edit.

    Args:
        traces: what to convert.
        target: `tasks`: rows with `task_id`, `main_query`, `init_messages` (the earlier turns, without system
            messages), `answer`, `rating` and the metadata of the trace. `sft`: rows with `task_id`, `messages` and
            `tools`. `preferences`: rows with `prompt`, `chosen` and `rejected`, each a list of messages (the
            conversational format of TRL), and `tools`.
        min_rating: leave out traces with a lower rating and without one, unless the answer was edited. Preference
            pairs compare ratings, so it does not apply to them.
    """
    left_out: Counter[str] = Counter()
    if target == "preferences":
        rows = _preferences(traces, left_out)
    else:
        kept = []
        for trace in traces:
            rating = trace.feedback.rating
            if min_rating is None or trace.feedback.edit or (rating is not None and rating >= min_rating):
                kept.append(trace)
            else:
                left_out["without a rating" if rating is None else f"rated below {min_rating:g}"] += 1
        rows = _tasks(kept, left_out) if target == "tasks" else _transcripts(traces, kept, left_out)
    return Conversion(tuple(rows), dict(left_out))


def redacted(trace: Trace, function: Callable[[str], str] | None, name: str) -> Trace:
    """Return the trace with `function` applied to every text, and without secrets of a known format.

    The function removes personal data from a text; messages contain its path, `name`.

    Raises:
        TaskDataError: the function raised an error, or did not return a text.
    """

    def clean(text: str) -> str:
        if function is not None:
            try:
                result: Any = function(text)
            except AstunerError:
                raise
            except (Exception, SystemExit) as error:
                where = f"{name}, called with a text of trace {short_repr(trace.trace_id)},"
                # The text is personal data, which must not reach the log through the error.
                raise TaskDataError(f"{where} raised {type(error).__name__} (at {raised_at(error)}).") from None
            if not isinstance(result, str):
                raise TaskDataError(f"{name} returned an object of type {type(result).__name__}; expected a text.")
            text = result
        return remove_secrets(text)

    def clean_value(value: Any) -> Any:
        if isinstance(value, str):
            return clean(value)
        if isinstance(value, Mapping):
            return {key: item if key in ("role", "type", "id") else clean_value(item) for key, item in value.items()}
        return [clean_value(item) for item in value] if isinstance(value, list | tuple) else value

    conversations = tuple(
        replace(c, messages=tuple(clean_value(message) for message in c.messages)) for c in trace.conversations
    )
    feedback = Feedback(trace.feedback.rating, clean(trace.feedback.edit), clean(trace.feedback.comment))
    return replace(trace, conversations=conversations, feedback=feedback, metadata=clean_value(trace.metadata))


def _tasks(traces: Sequence[Trace], left_out: Counter[str]) -> list[dict[str, Any]]:
    rows = []
    for trace in traces:
        if not trace.question.strip():
            left_out["without a message of the user"] += 1
            continue
        prompt = trace.main.prompt
        last = max(index for index, message in enumerate(prompt) if message["role"] == "user")
        earlier = [message for message in prompt[:last] if message["role"] not in ("system", "developer")]
        row: dict[str, Any] = {"task_id": trace.trace_id, "main_query": trace.question}
        row |= {"init_messages": earlier} if earlier else {}
        row |= {"answer": trace.feedback.edit or trace.main.answer}
        row |= {} if trace.feedback.rating is None else {"rating": trace.feedback.rating}
        row |= {name: value for name, value in trace.metadata.items() if name not in ("task_id", "main_query")}
        rows.append(row)
    return rows


def _transcripts(traces: Sequence[Trace], accepted: Sequence[Trace], left_out: Counter[str]) -> list[dict[str, Any]]:
    """Return the conversations of the accepted traces.

    A later turn of a chat contains the earlier turns. So a turn is left out if another transcript extends it, and
    earlier answers that are not accepted have the weight 0.
    """
    accepted_ids = {trace.trace_id for trace in accepted}
    # An edited answer stays in the history of later turns in its original form.
    unwanted = {
        _key(trace.main.messages) for trace in traces if trace.trace_id not in accepted_ids or trace.feedback.edit
    }
    rows: list[dict[str, Any]] = []
    extended: set[str] = set()
    for trace in reversed(accepted):
        for number, conversation in enumerate(trace.conversations, 1):
            edit = trace.feedback.edit if conversation is trace.main else ""
            if not conversation.tools and any(message.get("tool_calls") for message in conversation.messages):
                left_out["with tool calls, but without the definitions of the tools"] += 1
            elif not edit and _key(conversation.messages) in extended:
                left_out["that a later turn contains"] += 1
            else:
                messages = _weighted(conversation, unwanted, extended)
                if edit:
                    messages[-1] = {"role": "assistant", "content": edit}
                part = f"-{number}" if len(trace.conversations) > 1 else ""
                row: dict[str, Any] = {"task_id": trace.trace_id + part, "messages": messages}
                rows.append(row | ({"tools": list(conversation.tools)} if conversation.tools else {}))
    return rows[::-1]


def _weighted(conversation: TracedConversation, unwanted: set[str], extended: set[str]) -> list[Message]:
    """Return the messages with the weight 0 for unwanted earlier answers, and add the others to `extended`."""
    messages = list(conversation.messages)
    for end, message in enumerate(conversation.messages, 1):
        if message["role"] == "assistant":
            key = _key(conversation.messages[:end])
            if key in unwanted and end < len(messages):
                messages[end - 1] = {**message, "weight": 0}
            else:
                extended.add(key)
    return messages


def _key(messages: Sequence[Message]) -> str:
    return "\n".join(message_keys(messages))


def _preferences(traces: Sequence[Trace], left_out: Counter[str]) -> list[dict[str, Any]]:
    """Return edits paired with the answers that they correct, and pairs of differently rated answers to one prompt."""
    rows, paired = [], set[str]()
    by_prompt: dict[str, list[Trace]] = {}
    for trace in traces:
        main = trace.main
        if trace.feedback.edit and trace.feedback.edit != main.answer:
            rows.append(_pair(main, {"role": "assistant", "content": trace.feedback.edit}, main.messages[-1]))
            paired.add(trace.trace_id)
        if trace.feedback.rating is not None:
            by_prompt.setdefault(_key(main.prompt) + json.dumps(main.tools, sort_keys=True), []).append(trace)
    for group in by_prompt.values():
        ranked = sorted(group, key=lambda trace: -(trace.feedback.rating or 0.0))
        best, seen = ranked[0], {_key(ranked[0].main.messages)}
        for worse in ranked[1:]:
            key = _key(worse.main.messages)
            if worse.feedback.rating != best.feedback.rating and key not in seen:
                seen.add(key)
                rows.append(_pair(best.main, best.main.messages[-1], worse.main.messages[-1]))
                paired |= {best.trace_id, worse.trace_id}
    if others := sum(trace.trace_id not in paired for trace in traces):
        left_out["without an edit, and without another answer to the same prompt that has another rating"] += others
    return rows


def _pair(conversation: TracedConversation, chosen: Message, rejected: Message) -> dict[str, Any]:
    row: dict[str, Any] = {"prompt": list(conversation.prompt), "chosen": [chosen], "rejected": [rejected]}
    return row | ({"tools": list(conversation.tools)} if conversation.tools else {})


@dataclass(frozen=True, slots=True)
class ImportedTraces:
    """An import's result, and the number of rows in each file."""

    conversion: Conversion
    training: int
    validation: int


def import_traces(
    config: FeedbackTracingConfig, target: Target, *, base_dir: Path, search: Sequence[Path]
) -> ImportedTraces:
    """Read the traces of a source and write their training data as JSON Lines.

    The split is random and depends on the number of rows only.

    Relative paths that do not exist in the working directory start from `base_dir`, the YAML file's folder, and
    `package.module->function` is searched for in `search`.

    Raises:
        PluginError: the function `redact` cannot be loaded.
        TaskDataError: the source cannot be read, or no trace is left.
        RecordError: a file cannot be written.
    """
    clean = load_function(config.redact, search=search) if config.redact else None
    feedback = find_path(config.feedback_path, base_dir) if config.feedback_path else None
    source_path = path_from_function(config.base_url, search) if "->" in config.base_url else config.base_url
    source = find_path(source_path, base_dir)
    read = read_traces(source, feedback, skip_bad_rows=config.skip_bad_rows)
    traces = [redacted(trace, clean, config.redact or "") for trace in read.traces]
    conversion = convert(traces, target, min_rating=config.min_rating)
    if config.filters:
        left_out = Counter(conversion.left_out)
        with contextlib.closing(LlmClient(config.llm, config.alien_llm_model, config.alien_llm_response_length)) as llm:
            rows = llm.run(evaluate_rows(llm, conversion.rows, config.filters, left_out))
        conversion = Conversion(tuple(rows), dict(left_out))
    if not conversion.rows:
        raise TaskDataError(
            f"{source}: none of its {len(traces)} traces can be used"
            + (f": left out {describe_left_out(conversion.left_out)}." if conversion.left_out else ".")
        )
    if conversion.left_out:
        logger.info("{}: left out {}", source, describe_left_out(conversion.left_out))
    count = min(round(len(conversion.rows) * config.validation_share), len(conversion.rows) - 1)
    chosen = set(random.Random(0).sample(range(len(conversion.rows)), count))
    training = [row for index, row in enumerate(conversion.rows) if index not in chosen]
    validation = [row for index, row in enumerate(conversion.rows) if index in chosen]
    paths = [(config.train_output_path, training)]
    # An empty file takes the place of an earlier import's.
    paths += [(config.validation_output_path, validation)] if config.validation_share else []
    for path, part in paths:
        write_atomically(Path(path).expanduser(), b"".join(dump_json(row) + b"\n" for row in part))
    return ImportedTraces(conversion, len(training), len(validation))


def tracing_files(
    config: FeedbackTracingConfig, *, transcripts: bool, base_dir: Path, search: Sequence[Path]
) -> DatasetFileConfig:
    """Import traces for a run, and return the section that reads the files; see `import_traces`.

    With `transcripts`, these are transcripts for supervised training instead of tasks.
    """
    imported = import_traces(config, "sft" if transcripts else "tasks", base_dir=base_dir, search=search)
    validation = str(Path(config.validation_output_path).expanduser().absolute()) if imported.validation else ""
    return DatasetFileConfig(
        training=DatasetFileSplit(file_path=str(Path(config.train_output_path).expanduser().absolute())),
        validation=DatasetFileSplit(file_path=validation),
    )
