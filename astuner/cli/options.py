"""Options that several commands share, and extensions of click."""

from __future__ import annotations

import io
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import yaml
from click.shell_completion import CompletionItem

from astuner.debugging.breakpoints import enable_tags
from astuner.doors import DOORS, through_door
from astuner.errors import AstunerError, did_you_mean, short_repr
from astuner.system.redaction.redactor import redact

_BACKBONES = ("auto", "debug", "local", "verl", "trinity")
CONF = click.option(
    "--conf", required=True, type=click.Path(path_type=Path), metavar="FILE", help="YAML file with the configuration."
)
BACKBONE = click.option(
    "--backbone",
    metavar="NAME",
    shell_complete=lambda _context, _option, incomplete: [name for name in _BACKBONES if name.startswith(incomplete)],
    help="Override astuner.backbone: auto, debug, local, verl or trinity.",
)
EXP_DIR = click.option(
    "--exp-dir", default="launcher_record", show_default=True, metavar="DIR", help="Folder of the run records."
)


def complete_keys(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the configuration keys that start with `incomplete`, each with `=`, for shell completion."""
    from astuner.config.keys import dotted, schema

    return [f"{dotted(key)}=" for key in schema().keys if dotted(key).startswith(incomplete)]


def complete_runs(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of recorded runs that start with `incomplete`, for shell completion."""
    from astuner.run_record.folder import is_record

    folder = Path(ctx.params.get("exp_dir") or "launcher_record")
    return [run.name for run in folder.glob(f"{incomplete}*") if is_record(run)] if folder.is_dir() else []


SERVICES = click.option(
    "--with-NAME",
    "services",
    multiple=True,
    metavar="",
    help="Start the service NAME before the run and stop it afterwards. NAME is a key of astuner.services, or one of "
    "ray, ray-cluster, logview, appworld. Can be repeated.",
)
DEBUGGER = click.option(
    "--db",
    metavar="TAG1|TAG2",
    expose_value=False,
    callback=lambda _context, _option, tags: None if tags is None else enable_tags(tags),
    help="Stop in the debugger at the lines bp('TAG1') and bp('TAG2'). With --backbone=debug, it runs in this "
    "terminal, one episode at a time; in training, attach to debug.debugger_port.",
)
TUNED_MODEL = click.option(
    "--model",
    required=True,
    metavar="RUN",
    shell_complete=complete_runs,
    help="Name of a run, whose tuned model is used, or a model as in model.path: a folder, a Hugging Face name, or "
    "package.module->f.",
)
SHOW = click.option(
    "--show",
    metavar="N|all|none",
    callback=lambda _context, _option, value: None if value is None else _shown(value),
    help="Transcripts per task of a debug or dry run: N of them from the best to the worst, all in full, or none. "
    "[default: 2]",
)
CHECKPOINT_DIR = click.option(
    "--checkpoint-dir",
    type=click.Path(path_type=Path),
    default=Path("launcher_record/tinker"),
    show_default=True,
    metavar="DIR",
    help="Folder of the saved weights, which a restarted server finds again.",
)
OVERRIDES = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=complete_keys)


def _shown(value: str) -> int | str:
    if value in ("all", "none"):
        return value
    if value.isascii() and value.isdigit() and 0 < len(value) < 7:
        return int(value) or "none"
    raise click.BadParameter(f"{short_repr(value)} is not a number, all or none")


_TINKER_LIMITS = (
    ("--max-models", None, 4, "Maximum number of models in training."),
    ("--max-engines", None, 3, "Maximum number of sampling engines in memory."),
    ("--max-samplers", None, 8, "Maximum number of samplers per run on disk."),
    ("--max-body", 65536, 64, "Maximum size of a request, in MiB."),
)


def tinker_limits(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of `serve-tinker` that limit its models, engines, samplers and requests."""
    for name, highest, default, text in reversed(_TINKER_LIMITS):
        kind = click.IntRange(1, highest)
        command = click.option(name, type=kind, default=default, show_default=True, help=text)(command)
    return command


def quoted(value: str) -> str:
    """Return a text as an override's value in Hydra's grammar, which keeps every character."""
    # A backslash escapes a quote, and another one only before a quote.
    escaped = re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), value)
    return f"'{escaped}'"


def params_option(option: str, text: str, *name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return an option of the form NAME=VALUE that can be repeated; the command receives a dict as parameter `name`."""

    def parse(_context: click.Context, _option: click.Parameter, texts: tuple[str, ...]) -> dict[str, Any]:
        params = {}
        for given in texts:
            key, equals, value = given.partition("=")
            if not (key and equals):
                raise click.BadParameter(f"{given!r} is not of the form NAME=VALUE")
            try:
                params[key] = yaml.safe_load(value)
            except yaml.YAMLError as error:
                raise click.BadParameter(f"the value of {key} is not YAML: {value!r}") from error
        return params

    return click.option(option, *name, multiple=True, metavar="NAME=VALUE", callback=parse, help=text)


def show_usage_error(error: click.ClickException) -> int:
    """Print an error of the command line without secrets, with a hint on a misplaced option; return its exit code."""
    if isinstance(error, click.NoSuchOption):
        error = click.UsageError(_unknown_option(error), error.ctx)
    error.show(text := io.StringIO())
    click.echo(redact(text.getvalue()), nl=False, err=True)
    return error.exit_code


def show_error(error: BaseException) -> int:
    """Print the error that ended a command; return its exit code."""
    if isinstance(error, KeyboardInterrupt | click.Abort):
        click.echo("interrupted", err=True)
        return 128 + getattr(error, "signal_number", signal.SIGINT)
    from astuner.launcher.console import print_error, print_internal_error

    if isinstance(error, AstunerError):
        print_error(error)
    else:
        print_internal_error(error)
    return 1


def _unknown_option(error: click.NoSuchOption) -> str:
    """Return the error for an unknown option: it belongs to another command, is a configuration key, or is misspelt."""
    name, ctx = error.option_name, error.ctx
    assert ctx is not None
    text = f"there is no option {short_repr(name)}"
    path: list[str] = []
    node: click.Context | None = ctx
    while node is not None and node.parent is not None:
        path.insert(0, node.command.name or "")
        node = node.parent
    command, parent = " ".join(("astuner", *path)), " ".join(("astuner", *path[:-1]))
    group = ctx.parent.command if ctx.parent else None
    names = group.list_commands(ctx) if isinstance(group, click.Group) else ()
    commands = [group.get_command(ctx, each) for each in names] if isinstance(group, click.Group) else []
    owners = [
        f"`{parent} {each.name}`"
        for each in commands
        if each is not None and any(name in option.opts for option in each.params)
    ]
    if owners:
        return f"{text} of `{command}`; it is an option of {' and '.join(owners)}"
    if any(each.name == "overrides" for each in ctx.command.params):
        key = _key_named(name) or (name.lstrip("-") if "." in name else None)
        if key is not None:
            return f"{text}; to set a key of the configuration, write it without dashes: {key}=VALUE"
    if error.possibilities:
        return f"{text}; did you mean {' or '.join(map(repr, sorted(error.possibilities)))}?"
    return f"{text}; `{command} --help` lists the options"


def _key_named(option: str) -> str | None:
    """Return the key of the configuration that was written as an option (`--num-repeat`), or None."""
    from astuner.config.keys import dotted, nearest_key, parts, schema

    path = parts(option.lstrip("-").replace("-", "_"))
    if path in schema().keys:
        return dotted(path)
    same_name = [key for key in schema().keys if key[-len(path) :] == path]
    return dotted(min(same_name, key=len)) if same_name else nearest_key(path)


_KILL_REMOVED = (
    "{} was removed, because it ended processes by name, including those of other users. A run stops the services that "
    "it started (--with-NAME), even if it fails or is killed. If a port is in use, the error names the process, so "
    "that you can end it"
)


class TrainByDefaultGroup(click.Group):
    """A group that reads `astuner --conf …` as `astuner train --conf …`, and imports other commands when they run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted([*self.commands, *DOORS["command"]])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command; import it if it is not part of the core. None if there is no such command."""
        if cmd_name in DOORS["command"]:
            command: click.Command = through_door("command", cmd_name)
            return command
        return super().get_command(ctx, cmd_name)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert `train` if no command is named; reject unknown commands, with the most similar one."""
        names = self.list_commands(ctx)
        if args and args[0] not in names and args[0] not in ("-h", "--help", "--version"):
            name = args[0]
            if not name.startswith("-") and "=" not in name:
                if name.endswith((".yaml", ".yml")):
                    hint = f"to train with this configuration, run: astuner --conf {name}"
                else:
                    hint = did_you_mean(name, names) or f"the commands are: {', '.join(names)}"
                raise click.UsageError(f"there is no command {name!r}; {hint}", ctx)
            args = ["train", *args]
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the commands and options that start with `incomplete`, including the options of `train`."""
        items = super().shell_complete(ctx, incomplete)
        if incomplete.startswith("-"):
            train = self.commands["train"]
            items += train.shell_complete(click.Context(train, parent=ctx, info_name="train"), incomplete)
        return items


class DefaultCommandGroup(click.Group):
    """A group that inserts the name of its default command if no command is named."""

    def __init__(self, *args: Any, default: str, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._default = default

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert the default command."""
        if args and args[0] not in (*self.commands, "-h", "--help"):
            args = [self._default, *args]
        return super().parse_args(ctx, args)


class ServicesCommand(click.Command):
    """A command that accepts `--with-NAME` for any NAME, because the configuration declares the services."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read `--with-NAME` as `--with-NAME NAME`; reject the removed options --kill and --autokill."""
        expanded: list[str] = []
        for argument in args:
            option = argument.partition("=")[0]
            if option in ("--kill", "--autokill"):
                raise click.UsageError(_KILL_REMOVED.format(option), ctx)
            is_service = argument.startswith("--with-")
            expanded += ["--with-NAME", argument.removeprefix("--with-")] if is_service else [argument]
        return super().parse_args(ctx, expanded)
