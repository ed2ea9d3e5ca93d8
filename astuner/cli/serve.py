"""The commands that serve a model or talk to one, and `astuner stop-engine`."""

from __future__ import annotations

from pathlib import Path

import click

from astuner.cli.options import CHECKPOINT_DIR, EXP_DIR, TUNED_MODEL, tinker_limits


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
    from astuner.launcher.serve import serve as start_server

    def on_ready(address: str) -> None:
        click.echo(f"serving {model} at {address} (press Ctrl-C to stop)")

    start_server(model, traces, Path(exp_dir), port, temperature, max_tokens, renderer, on_ready)


@click.command(name="serve-tinker")
@click.option(
    "--model", required=True, metavar="PATH", help="Folder, Hugging Face name or package.module->f, as model.path."
)
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default=True, help="Port; 0 for any free one.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option(
    "--dtype", type=click.Choice(["auto", "float32", "bfloat16", "fastest"]), default="auto", show_default=True
)
@CHECKPOINT_DIR
@tinker_limits
def serve_tinker(
    model: str,
    port: int,
    device: str,
    dtype: str,
    checkpoint_dir: Path,
    max_models: int,
    max_engines: int,
    max_samplers: int,
    max_body: int,
) -> None:
    """Serve a model to training loops written for Tinker (tinker 0.20 to 0.38).

    The server listens on this machine only, until Ctrl-C.
    """
    from astuner.tinker_server.http_server import serve
    from astuner.tinker_server.service import Limits

    limits = Limits(max_models, max_engines, max_samplers, max_body * 2**20)

    def on_ready(address: str, names: tuple[str, ...]) -> None:
        click.echo(f"serving {names[0]} at {address} (press Ctrl-C to stop)")

    serve(model, checkpoint_dir, on_ready, port=port, device=device, dtype=dtype, limits=limits)


@click.command(name="stop-engine")
def stop_engine() -> None:
    """Stop the warm vLLM servers, which --keep-engine keeps running."""
    from astuner.llm_engine.vllm_server.warm_servers import stop_warm_servers

    stopped = stop_warm_servers()
    for server in stopped:
        click.echo(f"stopped the warm vLLM server on port {server.settings.port} (process {server.server.pid})")
    if not stopped:
        click.echo("no warm vLLM server is running")


@click.command()
@TUNED_MODEL
@click.option(
    "--conf",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Configuration of an agent: each question is a task for its workflow, with its tools.",
)
@click.option("--system", default="", metavar="TEXT", help="System message. Not allowed with --conf.")
@click.option(
    "--temperature",
    type=click.FloatRange(0, 100),
    default=0.0,
    show_default=True,
    help="Sampling temperature. Not allowed with --conf, which sets its own.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    default=512,
    show_default=True,
    help="Maximum tokens of an answer. Not allowed with --conf.",
)
@EXP_DIR
@click.pass_context
def chat(
    ctx: click.Context, model: str, conf: Path | None, system: str, temperature: float, max_tokens: int, exp_dir: str
) -> None:
    """Talk to a tuned model, or to the agent of a configuration that uses it.

    Each line of the standard input is a question.
    """
    if conf is not None:
        for option in ("system", "temperature", "max_tokens"):
            if ctx.get_parameter_source(option) is click.core.ParameterSource.COMMANDLINE:
                name = f"--{option.replace('_', '-')}"
                raise click.UsageError(f"{name} cannot be combined with --conf, whose rollout.val_kwargs apply")
    from astuner.launcher.chat import chat as start_chat

    start_chat(model, conf, Path(exp_dir), system, temperature, max_tokens)
