"""The commands `astuner env`."""

from __future__ import annotations

import json
from pathlib import Path
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
    """List the installed environments of each family, and why others cannot be used."""
    for name in [family] if family else ADAPTERS:
        row: dict[str, Any] = {"family": name, "installed": True, "environments": [], "unusable": {}, "error": None}
        try:
            family_module = adapter(name)
            row["environments"] = list(family_module.names())
            row["unusable"] = dict(family_module.faults()) if hasattr(family_module, "faults") else {}
        except EnvError as error:
            row |= {"installed": False, "error": str(error)}
        if as_json:
            click.echo(json.dumps(row))
            continue
        click.echo(f"{name}: {row['error'] or len(row['environments'])}")
        for environment in row["environments"]:
            click.echo(f"  {name}/{environment}")
        for environment, fault in row["unusable"].items():
            click.echo(f"  {name}/{environment} cannot be used: {fault}")


@env.command()
@click.option(
    "--env",
    "environments",
    multiple=True,
    required=True,
    metavar="ENV",
    help="The environment: FAMILY/NAME, FAMILY/* for a whole family, or package.module->Class. NAME=ENV serves it "
    "under another name. Can be repeated.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; others need a token.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="0 for any free port.")
@click.option(
    "--token",
    envvar="ASTUNER_ENV_TOKEN",
    default="",
    metavar="TOKEN",
    help="Token that clients must send. Other users can read command lines, so rather set the environment variable "
    "ASTUNER_ENV_TOKEN.",
)
@click.option(
    "--path",
    "search",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Folder to search for package.module->Class, after the working directory. Can be repeated.",
)
@click.option("--max-instances", type=click.IntRange(1, 100_000), default=128, show_default=True)
@click.option(
    "--idle-seconds",
    type=click.FloatRange(0, 1e8, min_open=True),
    default=600.0,
    show_default=True,
    help="Release an instance after this time without a request.",
)
@click.option(
    "--lease-seconds",
    type=click.FloatRange(0, 1e8, min_open=True),
    default=30.0,
    show_default=True,
    help="Release the instances of a client that has not sent a heartbeat for this time.",
)
@click.option(
    "--step-timeout",
    type=click.FloatRange(0, 1e8, min_open=True),
    default=60.0,
    show_default=True,
    help="Time limit of a reset, a step or an evaluation, in seconds.",
)
@click.option(
    "--max-observation-bytes",
    type=click.IntRange(1, 2**30),
    default=2**20,
    show_default=True,
    help="Maximum size of an observation.",
)
def serve(
    environments: tuple[str, ...],
    host: str,
    port: int,
    token: str,
    search: tuple[Path, ...],
    max_instances: int,
    idle_seconds: float,
    lease_seconds: float,
    step_timeout: float,
    max_observation_bytes: int,
) -> None:
    """Serve environments over HTTP.

    Each instance has a process of its own. Runs use the service with task_reader.type: env_service. The service runs
    until Ctrl-C.
    """
    from astuner.env_service.instances import ServiceLimits
    from astuner.env_service.server import EnvServiceOptions, serve

    limits = ServiceLimits(max_instances, idle_seconds, lease_seconds, step_timeout, max_observation_bytes)
    options = EnvServiceOptions(dict(map(_named, environments)), host, port, token, search, limits)
    serve(options, lambda address: click.echo(f"serving {', '.join(options.env_types)} at {address} (Ctrl-C stops)"))


def _named(environment: str) -> tuple[str, str]:
    """Return the name of an environment in the service, and the environment."""
    name, equals, source = environment.partition("=")
    return (name, source) if equals else (environment, environment)
