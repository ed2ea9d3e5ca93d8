"""The commands `astuner env`."""

from __future__ import annotations

import json
from typing import Any

import click

from astuner.env_service.environment import ADAPTERS, adapter
from astuner.errors import EnvError

FAMILY = click.Choice(list(ADAPTERS))
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")


@click.group(name="env", no_args_is_help=True)
def env() -> None:
    """Show, check and serve interactive environments.

    TYPE is FAMILY/NAME, such as gymnasium/FrozenLake-v1, or package.module->Class.
    """


@env.command(name="list")
@click.option("--family", type=FAMILY, help="Only this family.")
@JSON
def list_environments(family: str | None, as_json: bool) -> None:
    """List the installed environments of each family."""
    for name in [family] if family else ADAPTERS:
        row: dict[str, Any] = {"family": name, "installed": True, "environments": [], "error": None}
        try:
            row["environments"] = list(adapter(name).names())
        except EnvError as error:
            row |= {"installed": False, "error": str(error)}
        if as_json:
            click.echo(json.dumps(row))
            continue
        click.echo(f"{name}: {row['error'] or len(row['environments'])}")
        for environment in row["environments"]:
            click.echo(f"  {name}/{environment}")
