"""The commands that make training data: `astuner generate` and `astuner trace`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from astuner.cli.options import CONF, OVERRIDES

if TYPE_CHECKING:
    from astuner.task_sources.tracing.trace import Trace

SOURCE = click.argument("source", type=click.Path(exists=True, path_type=Path))
FEEDBACK = click.option(
    "--feedback",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="JSON Lines file with trace_id and rating, edit or comment.",
)
SKIP = click.option("--skip-bad-rows", is_flag=True, help="Skip rows that cannot be read, instead of stopping at them.")
_SHOWN_CHARACTERS = 60


@click.command()
@CONF
@OVERRIDES
def generate(conf: Path, overrides: tuple[str, ...]) -> None:
    """Generate the tasks of task_reader.data_generation, without training.

    A generation that was interrupted continues without asking the same questions again.
    """
    from astuner.config.loading import load_config
    from astuner.task_reader import describe_left_out
    from astuner.task_sources.data_generation import generate_tasks

    loaded = load_config(conf, overrides)
    section = loaded.config.astuner.task_reader.data_generation
    report = generate_tasks(section, base_dir=loaded.path.parent, search=(Path.cwd(), loaded.path.parent.absolute()))
    click.echo(f"{'kept' if report.reused else 'wrote'} {report.training} training tasks: {section.train_output_path}")
    if report.validation:
        click.echo(f"and {report.validation} validation tasks: {section.validation_output_path}")
    if report.left_out:
        click.echo(f"left out {describe_left_out(report.left_out)}")
    usage = report.usage
    click.echo(f"used {usage.tokens} tokens in {usage.requests} requests, cost {usage.cost:.4f}")


@click.group(name="trace", no_args_is_help=True)
def trace() -> None:
    """Show the traces of a deployed agent, and convert them to training data.

    SOURCE is AgentScope Studio's database.sqlite, a file of OpenTelemetry spans (OTLP JSON), a file with chats in
    OpenAI's format (JSON Lines), or a run's folder.
    """


@trace.command(name="show")
@SOURCE
@click.argument("trace_id", required=False)
@FEEDBACK
@SKIP
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def show(source: Path, trace_id: str | None, feedback: Path | None, skip_bad_rows: bool, as_json: bool) -> None:
    """List the traces of SOURCE, or show one trace's messages.

    TRACE_ID is a trace's id or a unique prefix of it. Texts are shown without redaction.
    """
    from astuner.task_sources.tracing.reader import read_traces

    read = read_traces(source, feedback, skip_bad_rows=skip_bad_rows)
    if trace_id is not None:
        matches = [item for item in read.traces if item.trace_id == trace_id]
        matches = matches or [item for item in read.traces if item.trace_id.startswith(trace_id)]
        if len(matches) != 1:
            raise click.UsageError(
                f"{len(matches)} of {len(read.traces)} traces have an id that begins with {trace_id!r}; expected one"
            )
        (chosen,) = matches
        click.echo(json.dumps(_fields(chosen, complete=True)) if as_json else _text(chosen))
        return
    for item in read.traces:
        click.echo(json.dumps(_fields(item, complete=False)) if as_json else _line(item))
    if not as_json:
        rated = sum(item.feedback.rating is not None for item in read.traces)
        edited = sum(bool(item.feedback.edit) for item in read.traces)
        click.echo(f"{len(read.traces)} traces ({read.kind}), {rated} rated, {edited} edited, {read.skipped} bad rows")


@trace.command(name="import")
@SOURCE
@click.option(
    "--to",
    "target",
    type=click.Choice(["tasks", "sft", "preferences"]),
    default="tasks",
    show_default=True,
    help="tasks: questions with answers; sft: transcripts for supervised training; preferences: pairs of answers.",
)
@click.option("--out", required=True, type=click.Path(dir_okay=False), metavar="FILE", help="Output file (JSON Lines).")
@click.option(
    "--validation-out",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Output file of the validation rows (JSON Lines).",
)
@click.option(
    "--validation-share",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.1,
    show_default=True,
    help="Share of the rows for --validation-out.",
)
@FEEDBACK
@click.option("--min-rating", type=float, metavar="X", help="Leave out answers with a lower rating or without one.")
@click.option(
    "--redact",
    metavar="PATH",
    help="package.module->function that takes a text and returns it without personal data. [default: none]",
)
@SKIP
def import_(
    source: Path,
    target: str,
    out: str,
    validation_out: str | None,
    validation_share: float,
    feedback: Path | None,
    min_rating: float | None,
    redact: str | None,
    skip_bad_rows: bool,
) -> None:
    """Convert the traces of SOURCE to tasks, transcripts or preference pairs.

    Without --redact, the file contains the texts of the users as they are.
    """
    from pydantic import ValidationError

    from astuner.config.task_sources import FeedbackTracingConfig
    from astuner.task_reader import describe_left_out
    from astuner.task_sources.tracing.convert import TARGETS, import_traces

    fields: dict[str, Any] = {
        "base_url": str(source),
        "feedback_path": str(feedback) if feedback else None,
        "train_output_path": out,
        "validation_output_path": validation_out or "",
        "validation_share": validation_share if validation_out else 0.0,
        "min_rating": min_rating,
        "redact": redact,
        "skip_bad_rows": skip_bad_rows,
    }
    try:
        config = FeedbackTracingConfig.model_validate(fields)
    except ValidationError as error:
        raise click.UsageError("; ".join(str(item["msg"]) for item in error.errors())) from error
    chosen = next(item for item in TARGETS if item == target)
    imported = import_traces(config, chosen, base_dir=Path.cwd(), search=(Path.cwd(),))
    click.echo(f"wrote {imported.training} rows to {out}")
    if validation_out:
        click.echo(f"wrote {imported.validation} rows to {validation_out}")
    if imported.conversion.left_out:
        click.echo(f"left out {describe_left_out(imported.conversion.left_out)}")


def _fields(item: Trace, *, complete: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "trace_id": item.trace_id,
        "question": item.question,
        "answer": item.main.answer,
        "rating": item.feedback.rating,
        "edit": item.feedback.edit,
        "comment": item.feedback.comment,
        "conversations": len(item.conversations),
    }
    if complete:
        fields["conversations"] = [
            {"agent": part.agent, "messages": part.messages, "tools": part.tools} for part in item.conversations
        ]
    return fields


def _line(item: Trace) -> str:
    rating = "–" if item.feedback.rating is None else f"{item.feedback.rating:g}"
    edited = " edited" if item.feedback.edit else ""
    return f"{item.trace_id}  rating {rating}{edited}  {_short(item.question)} → {_short(item.main.answer)}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARACTERS else line[: _SHOWN_CHARACTERS - 1] + "…"


def _text(item: Trace) -> str:
    lines = [_line(item)]
    for part in item.conversations:
        lines += ["", f"conversation of {part.agent or 'the agent'}"]
        for message in part.messages:
            calls = f" {json.dumps(message['tool_calls'])}" if message.get("tool_calls") else ""
            lines.append(f"  [{message['role']}] {message.get('content') or ''}{calls}")
    for name in ("edit", "comment"):
        if value := getattr(item.feedback, name):
            lines += ["", f"{name}: {value}"]
    return "\n".join(lines)
