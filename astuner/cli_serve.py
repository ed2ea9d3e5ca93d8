"""The command `astuner serve`."""

from __future__ import annotations

from pathlib import Path

import click

from astuner.cli_options import EXP_DIR, TUNED_MODEL


@click.command()
@TUNED_MODEL
@click.option(
    "--traces",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="JSON Lines file to which conversations and feedback are appended.",
)
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default=True, help="Port; 0 for any free one.")
@click.option(
    "--temperature",
    type=click.FloatRange(0, 100),
    default=1.0,
    show_default=True,
    help="Sampling temperature of requests that do not set one.",
)
@click.option(
    "--max-tokens", type=click.IntRange(1), default=512, show_default=True, help="Maximum tokens of an answer."
)
@click.option(
    "--renderer", default="", metavar="NAME", help="Renderer, as model.renderer. [default: that of the run, or auto]"
)
@EXP_DIR
def serve(
    model: str, traces: Path, port: int, temperature: float, max_tokens: int, renderer: str, exp_dir: str
) -> None:
    """Serve a model to clients of OpenAI's and Anthropic's APIs, and record its conversations.

    POST /v1/feedback adds a rating or a correction to a conversation. `astuner trace` and task_reader.type
    feedback_tracing read the file. The server listens on this machine only, until Ctrl-C.
    """
    from astuner.launcher.serve import ServeOptions
    from astuner.launcher.serve import serve as start_server

    options = ServeOptions(model, traces, Path(exp_dir), port, temperature, max_tokens, renderer)
    start_server(options, lambda address: click.echo(f"serving {model} at {address} (press Ctrl-C to stop)"))
