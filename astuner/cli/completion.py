"""The command `astuner completion`."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")
_VARIABLE = "_ASTUNER_COMPLETE"


@click.command()
@click.argument("shell", required=False, type=click.Choice(SHELLS))
@click.option("--print", "only_print", is_flag=True, help="Print the script instead of installing it.")
def completion(shell: str | None, only_print: bool) -> None:
    """Install tab completion for commands, options, runs, backbones and configuration keys.

    SHELL is the shell of the environment variable SHELL by default.
    """
    name = shell or Path(os.environ.get("SHELL", "")).name
    if name not in SHELLS:
        raise click.UsageError(f"the shell {name!r} has no completion; name one of: {', '.join(SHELLS)}")
    from astuner.cli.main import astuner

    kind = get_completion_class(name)
    assert kind is not None  # click has the three shells
    # `_check_version` runs bash, which may be missing where the script is only printed.
    script = kind.source_template % kind(astuner, {}, "astuner", _VARIABLE).source_vars()
    if only_print:
        click.echo(script)
        return
    for path in _install(name, script):
        click.echo(f"wrote {path}")
    click.echo("open a new shell to use it")


def _install(shell: str, script: str) -> list[Path]:
    """Write the script, and have the shell read it when it starts; return the changed files."""
    if shell == "fish":
        config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
        return [_written(config / "fish" / "completions" / "astuner.fish", script)]
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    changed = [_written(data / "astuner" / f"completion.{shell}", script)]
    startup = Path(os.environ.get("ZDOTDIR") or Path.home()) / ".zshrc" if shell == "zsh" else Path.home() / ".bashrc"
    quoted = shlex.quote(str(changed[0]))
    line = f"[ -f {quoted} ] && source {quoted}  # completion of astuner"
    if shell == "zsh":
        line = f"autoload -Uz compinit && compinit; {line}"
    text = startup.read_text() if startup.exists() else ""
    if line not in text.splitlines():
        separator = "" if not text or text.endswith("\n") else "\n"
        changed.append(_written(startup, f"{text}{separator}{line}\n"))
    return changed


def _written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path
