"""The command `astuner chat`."""

from __future__ import annotations

from pathlib import Path

import click

from astuner.cli.options import EXP_DIR, TUNED_MODEL


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
    from astuner.launcher.chat import TerminalChat
    from astuner.launcher.chat import chat as start_chat

    start_chat(TerminalChat(model, conf, Path(exp_dir), system, temperature, max_tokens))
