"""The command `astuner init`."""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path

import click

from astuner.launcher.starter import REQUIREMENTS, TEMPLATES


@click.command()
@click.argument("folder", default=".", type=click.Path(path_type=Path))
@click.option(
    "--template", type=click.Choice(TEMPLATES), default="chat", show_default=True, help="Kind of agent to start from."
)
def init(folder: Path, template: str) -> None:
    """Create a small project in FOLDER that runs without changes.

    It has an agent, a judge, tasks, a configuration and launch.json for VS Code. FOLDER is the working directory by
    default. Existing files are not overwritten.
    """
    from astuner.launcher.starter import start_project

    files = start_project(folder, template)
    for name in files.written:
        click.echo(f"wrote {folder / name}")
    for name in files.existing:
        click.echo(f"skipped {folder / name}, which already exists")
    module, extra = REQUIREMENTS.get(template, ("", ""))
    if module and importlib.util.find_spec(module) is None:
        click.echo(f'the template needs {module}: pip install "astuner[{extra}]"')
    if "agent.yaml" in files.written and {"agent.py", "judge.py"} & set(files.existing):
        click.echo("agent.yaml names the agent and judge of the starter project; change them to yours")
    elif files.written:
        enter = "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder))} && "
        click.echo(f"next: {enter}astuner --conf agent.yaml --backbone=debug")
