"""How the `astuner` command reads its command line, where click alone does not."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

import click


class TrainByDefault(click.Group):
    """A group that takes `astuner --conf …` for `astuner train --conf …`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put `train` in front where no command is named; refuse a word that is none, with the nearest one."""
        asks_for_help = bool(args) and args[0] in ("--help", "--version")
        if args and args[0] not in self.commands and not asks_for_help:
            if not args[0].startswith("-") and "=" not in args[0]:
                raise click.UsageError(_no_such_command(args[0], self.commands), ctx)
            args = ["train", *args]
        return super().parse_args(ctx, args)


class WithServices(click.Command):
    """A command that takes `--with-NAME` for any name: which there are is in the configuration."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read `--with-NAME` as `--with-NAME NAME`; refuse the kill options of older versions."""
        spelled: list[str] = []
        for argument in args:
            option = argument.partition("=")[0]
            if option in ("--kill", "--autokill"):
                raise click.UsageError(_NO_KILL.format(option), ctx)
            is_service = argument.startswith("--with-")
            spelled += ["--with-NAME", argument.removeprefix("--with-")] if is_service else [argument]
        return super().parse_args(ctx, spelled)


_NO_KILL = (
    "{} of older versions ended processes by their name, other people's too, and is no longer offered. A run stops "
    "what it started itself (--with-NAME), also when it fails or is killed; if a port is in use, the error says by "
    "which process, and you can end that one"
)


def _no_such_command(given: str, commands: Iterable[str]) -> str:
    if given.endswith((".yaml", ".yml")):
        return f"{given!r} is no command; to train with a configuration, write: astuner --conf {given}"
    near = get_close_matches(given, commands, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(sorted(commands))}"
    return f"{given!r} is no command; {hint}"
