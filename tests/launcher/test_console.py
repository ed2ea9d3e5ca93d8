"""Lines of the console: whole words, and repeated warnings once."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from loguru import logger
from rich.console import Console
from rich.markup import escape

from astuner.launcher import console as console_module
from astuner.launcher.console import log_to_console

LONG_PATH = "/" + "folder/" * 20 + "run.yaml"
TEXT = f"the configuration names no tasks in [bold]{LONG_PATH}[/], so there is nothing to train on, whatever the reward"


def a_console(*, is_terminal: bool) -> Console:
    return console_module._RobustConsole(
        file=io.StringIO(), width=80, force_terminal=is_terminal, highlight=False, color_system=None
    )


def written(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.fixture
def handler() -> Iterator[None]:
    """Remove the handler of the test."""
    yield
    logger.remove(console_module._console_handler)


def test_a_terminal_breaks_lines_between_words_and_keeps_long_words() -> None:
    console = a_console(is_terminal=True)
    console.print(escape(TEXT), soft_wrap=True)
    lines = written(console)
    assert " ".join(line.rstrip() for line in lines) == TEXT
    assert all(len(line.rstrip()) <= 80 for line in lines if LONG_PATH not in line)
    assert len(lines) > 2


def test_a_file_gets_one_line() -> None:
    console = a_console(is_terminal=False)
    console.print(escape(TEXT), soft_wrap=True)
    assert written(console) == [TEXT]


@pytest.mark.usefixtures("handler")
def test_warnings_that_differ_in_numbers_are_printed_ever_less() -> None:
    console = a_console(is_terminal=False)
    log_to_console(console)
    for step in range(1, 21):
        logger.warning("step {}: nothing to learn", step)
        logger.info("step {}/20", step)
    logger.warning("step one: another warning")
    lines = [line[9:] for line in written(console)]
    assert [line for line in lines if "nothing" in line] == [
        "step 1: nothing to learn",
        "step 2: nothing to learn",
        "step 3: nothing to learn",
        "step 4: nothing to learn (4 such warnings so far; run.log has all)",
        "step 8: nothing to learn (8 such warnings so far; run.log has all)",
        "step 16: nothing to learn (16 such warnings so far; run.log has all)",
    ]
    assert sum("/20" in line for line in lines) == 20
    assert lines[-1] == "step one: another warning"
