"""The table of a debug run: a narrow terminal loses no number, and no text of a task or an error acts on it."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console
from rich.markup import escape

from astuner.launcher.console import episode_table, make_console
from astuner.schema import Episode, Task

EPISODE = Episode(
    episode_id="train-000001-t-0",
    task=Task("t", "a question of more than forty characters, which is cut in the table"),
    repeat_index=0,
    status="ok",
    reward=-1234.5,
    is_success=True,
    start_time=0.0,
    end_time=123456.78,
)


def shown(*episodes: Episode, width: int = 80) -> list[str]:
    """The lines of the table in a terminal of that width."""
    out = io.StringIO()
    Console(file=out, width=width).print(episode_table("episodes", episodes))
    return out.getvalue().splitlines()


def test_at_80_columns_only_the_task_is_cut() -> None:
    lines = shown(EPISODE, EPISODE)
    assert all(len(line) <= 80 for line in lines)
    (header,) = [line.split() for line in lines if "reward" in line]
    assert header == ["task", "reward", "success", "calls", "tokens", "samples", "forks", "seconds"]
    rows = [line for line in lines if "a quest" in line]
    assert len(rows) == 2  # a line each
    assert rows[0].split("…")[1].split() == ["-1234.50", "yes", "0", "0", "0", "0", "123456.78"]
    (wide, _) = [line for line in shown(EPISODE, EPISODE, width=200) if "a quest" in line]
    assert wide.strip().startswith(EPISODE.task.main_query[:40])


def test_a_text_with_brackets_is_not_markup() -> None:
    bracketed = replace(EPISODE, task=Task("t", "[bold]sum[/] of [1, 2]"))
    assert any("[bold]sum[/] of [1, 2]" in line for line in shown(bracketed, width=120))


def test_control_characters_are_shown_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = replace(EPISODE, task=Task("t", "\x1b[2J a\nb\x1b]0;title\x07 \u202e\x9b"))
    console = make_console(stderr=False)
    console.width = 120
    console.print(episode_table("episodes", [hostile]))
    console.print(escape("failed: \x1b[31mred\x1b[0m \ud800"))
    output = capsys.readouterr().out
    assert "\x1b" not in output
    assert "\u202e" not in output
    (row,) = [line for line in output.splitlines() if "a␊b" in line]
    assert "␛[2J a␊b␛]0;title␇" in row
    assert "failed: ␛[31mred␛[0m <U+D800>" in output
