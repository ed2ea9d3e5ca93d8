"""The commands `astuner env`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from astuner.cli.options import params_option
from astuner.env_service.environment import ADAPTERS, adapter
from astuner.errors import EnvError

if TYPE_CHECKING:
    from astuner.env_service.validation import EnvValidation

FAMILY = click.Choice(list(ADAPTERS))
SECONDS = click.FloatRange(0, 1e8, min_open=True)
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
URL = click.option(
    "--url",
    metavar="URL",
    help="Use the running service at this address, with the token in ASTUNER_ENV_TOKEN. [default: processes of this "
    "command]",
)
PARAMS = params_option("--param", "Parameter of the environment, with a YAML value. Can be repeated.", "params")


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
            row["environments"] = [f"{name}/{environment}" for environment in _names(name)]
            row["unusable"] = {f"{name}/{environment}": fault for environment, fault in _faults(name).items()}
        except EnvError as error:
            row |= {"installed": False, "error": str(error)}
        if as_json:
            click.echo(json.dumps(row))
            continue
        click.echo(f"{name}: {row['error'] or len(row['environments'])}")
        for environment in row["environments"]:
            click.echo(f"  {environment}")
        for environment, fault in row["unusable"].items():
            click.echo(f"  {environment} cannot be used: {fault}")


@env.command()
@click.argument("env_type", metavar="TYPE")
@click.option("--split", metavar="SPLIT", help="Split of the task. [default: the first]")
@click.option("--task", "task_id", metavar="ID", help="Id of the task. [default: the first]")
@click.option("--reference", "with_reference", is_flag=True, help="Also show the reference, a solution of the task.")
@PARAMS
@URL
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show(
    env_type: str,
    split: str | None,
    task_id: str | None,
    with_reference: bool,
    params: dict[str, Any],
    url: str | None,
    as_json: bool,
) -> None:
    """Show a task: its instruction, the first observation and the tools."""
    from astuner.env_service.validation import service_client, show_task

    async def load() -> dict[str, Any]:
        async with service_client([env_type], url) as client:
            return await show_task(client, env_type, params, split, task_id)

    shown = asyncio.run(load())
    if not with_reference:
        shown.pop("reference")
    if as_json:
        click.echo(json.dumps(shown, ensure_ascii=False))
        return
    for name, value in shown.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        click.echo(f"{name}:\n{text}\n" if "\n" in text else f"{name}: {text}")


@env.command()
@click.argument("env_types", nargs=-1, metavar="[TYPE]...")
@click.option("--family", "families", type=FAMILY, multiple=True, help="All environments of a family. Can be repeated.")
@click.option("--all", "is_all", is_flag=True, help="All environments that are installed.")
@click.option("--tasks", type=click.IntRange(min=1), default=2, show_default=True, help="Tasks of each split.")
@click.option("--jobs", type=click.IntRange(min=1), default=2, show_default=True, help="Environments at a time.")
@click.option(
    "--timeout",
    type=SECONDS,
    default=120.0,
    show_default=True,
    help="Time limit of the checks of an environment, in seconds.",
)
@PARAMS
@URL
@JSON
def validate(
    env_types: tuple[str, ...],
    families: tuple[str, ...],
    is_all: bool,
    tasks: int,
    jobs: int,
    timeout: float,
    params: dict[str, Any],
    url: str | None,
    as_json: bool,
) -> int:
    """Check environments without a model.

    The reference must reach its full score, and an empty and a garbage answer less. Equal seeds must give equal
    observations. A released instance must be gone. Exits with code 1 if a check fails.
    """
    from astuner.env_service.validation import service_client, validate_all

    found: list[str] = []
    for family in tuple(ADAPTERS) if is_all else families:
        try:
            found += [f"{family}/{name}" for name in (*_names(family), *_faults(family))]
        except EnvError as error:
            if not is_all:
                raise
            click.echo(f"skipped {family}: {error}", err=True)
    chosen = list(dict.fromkeys([*env_types, *found]))
    if not chosen:
        raise click.UsageError("name an environment, or pass --family FAMILY or --all")

    async def check() -> list[EnvValidation]:
        results = []
        async with service_client(chosen, url, step_timeout=timeout) as client:
            async for result in validate_all(client, chosen, params, tasks, jobs, timeout):
                results.append(result)
                if as_json:
                    click.echo(json.dumps(result.to_json(), ensure_ascii=False))
        return results

    results = asyncio.run(check())
    if not as_json:
        _print_validations(results)
    return int(not all(result.ok for result in results))


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
    type=SECONDS,
    default=600.0,
    show_default=True,
    help="Release an instance after this time without a request.",
)
@click.option(
    "--lease-seconds",
    type=SECONDS,
    default=30.0,
    show_default=True,
    help="Release the instances of a client that has not sent a heartbeat for this time.",
)
@click.option(
    "--step-timeout",
    type=SECONDS,
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
    from astuner.env_service.http_server import serve
    from astuner.env_service.instances import ServiceLimits

    limits = ServiceLimits(max_instances, idle_seconds, lease_seconds, step_timeout, max_observation_bytes)
    served = {}
    for environment in environments:
        name, equals, source = environment.partition("=")
        served[name] = source if equals else environment

    def on_ready(address: str) -> None:
        click.echo(f"serving {', '.join(served)} at {address} (Ctrl-C stops)")

    serve(served, host, port, token, search, limits, on_ready)


def _names(family: str) -> Sequence[str]:
    """Return a family's environments; none if users name them."""
    names: Sequence[str] = getattr(adapter(family), "names", tuple)()
    return names


def _faults(family: str) -> dict[str, str]:
    """Return a family's environments that cannot be used because their package has a fault, with the fault."""
    module = adapter(family)
    return dict(module.faults()) if hasattr(module, "faults") else {}


def _print_validations(results: Sequence[EnvValidation]) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Column, Table

    from astuner.launcher.console import make_console

    table = Table(Column("environment", overflow="fold"), box=box.SIMPLE, padding=(0, 1, 0, 0))
    for name in ("", "reference", "empty", "garbage", "same", "p50 ms", "p95 ms"):
        table.add_column(name, no_wrap=True, min_width=len(name) or 5)
    for result in results:
        numbers = (result.reference, result.empty, result.garbage)
        times = (result.step_ms_p50, result.step_ms_p95)
        table.add_row(
            escape(result.env),
            "[green]ok[/]" if result.ok else "[bold red]fails[/]",
            *("-" if number is None else f"{number:.3g}" for number in numbers),
            {True: "yes", False: "no", None: "-"}[result.deterministic],
            *("-" if number is None else f"{number:.1f}" for number in times),
        )
    console = make_console(stderr=False)
    if not console.is_terminal:
        console.width = 120
    console.print(table)
    failed = [result for result in results if not result.ok]
    for result in failed:
        console.print(f"[bold red]{escape(result.env)}[/]: {escape(result.error or '')}", soft_wrap=True)
    console.print(f"{len(results) - len(failed)} of {len(results)} environments pass")
