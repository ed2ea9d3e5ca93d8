"""Each `astuner` command in the documentation is valid, including the commands that are not run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest

from astuner.cli.main import astuner as command
from tests.docs.test_docs import ROOT, Block, all_blocks, blocks


@pytest.mark.parametrize("block", [*all_blocks("bash"), *all_blocks("text")])
def test_commands_parse(block: Block):
    page_files = {other.file for other in blocks(block.page)}
    if any(["init"] in other.commands for other in blocks(block.page, "bash")):
        page_files.add("agent.yaml")
    for arguments in block.commands:
        if arguments[0] in ("--help", "--version"):
            continue
        conf = parameters(arguments).get("conf")
        # In a block that is not run, a file name without a folder is a file of the reader.
        is_of_the_reader = block.language == "text" and conf is not None and conf.parent == Path()
        assert conf is None or (ROOT / conf).is_file() or str(conf) in page_files or is_of_the_reader


def parameters(arguments: list[str]) -> dict[str, Any]:
    """Return the parameters of an `astuner` command; {} if it names a file of the reader, which does not exist here."""
    found: Any = command
    context = click.Context(command)
    for default in ("train", "run"):
        names = found.list_commands(context) if isinstance(found, click.Group) else []
        name = next((word for word in arguments[:1] if word in names), default)
        if name in names:
            found, arguments = found.get_command(context, name), arguments[arguments[:1] == [name] :]
    try:
        values: dict[str, Any] = found.make_context(found.name, list(arguments)).params
    except click.BadParameter as error:
        if error.param is None or not isinstance(error.param.type, click.Path):
            raise
        return {}
    return values
