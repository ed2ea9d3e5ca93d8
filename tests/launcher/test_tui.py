"""`astuner view --tui`: runs, episodes and transcripts in the terminal."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from astuner.run_record.record import RunRecord
from astuner.schema import Episode, LlmCall, Task
from tests.viewer.long_runs import many_episodes
from tests.viewer.records import open_record, step_metrics

pytest.importorskip("textual")

from astuner.cli.main import astuner
from astuner.viewer.tui.screens import EpisodesScreen, RunScreen, RunsScreen, TerminalViewer
from astuner.viewer.tui.transcript_screen import TranscriptScreen

HOSTILE = (
    "[red]x[/red] [@click=app.quit]y[/] [/] \x1b[2J\x1b]8;;http://evil.example\x07 \u202egnp.exe\u2066 \x9b \\[ :smile:"
)
_CONTROLS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def an_episode(number: int, reward: float | None, answer: str = "", question: str = "") -> Episode:
    question, name = question or f"What is {number} + 1?", f"train-1-t{number}-0"
    messages = (
        {"role": "system", "content": "Answer in digits."},
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer or f"It is {number + 1}."},
    )
    call = LlmCall(f"c{number}", name, (1, 2), (3,), (-0.5,), "stop", messages=messages)
    failed: dict[str, Any] = {"error_kind": "workflow", "error": f"ValueError: no tool {number}"}
    is_failed = reward is None
    return Episode(
        name, Task(f"t{number}", question, metadata={"answer": str(number + 1)}), 0, "failed" if is_failed else "ok",
        reward, None if is_failed else reward == 1.0, (call,), **(failed if is_failed else {}),
    )  # fmt: skip


def write(record: RunRecord, step: int, *episodes: Episode) -> None:
    for episode in episodes:
        record.write_episode(step, "train", episode)
    record.log_metrics(step, step_metrics(step))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two runs: one with solved, unsolved and failed episodes, and one without episodes."""
    with open_record(tmp_path / "runs" / "digits") as record:
        write(record, 1, *(an_episode(number, float(number % 2)) for number in range(4)))
        write(record, 2, an_episode(4, None), an_episode(5, None), an_episode(6, 1.0, answer="seven apples"))
    open_record(tmp_path / "runs" / "empty").close()
    return tmp_path / "runs"


class Terminal:
    """The viewer in a terminal of the test."""

    def __init__(self, app: TerminalViewer, pilot: Any) -> None:
        self.app = app
        self._pilot = pilot

    async def press(self, *keys: str) -> None:
        """Press keys, and wait until the screen shows the result."""
        await self._pilot.press(*keys)
        await self.settle()

    async def settle(self) -> None:
        for _ in range(3):
            await self.app.workers.wait_for_complete()
            await self._pilot.pause()

    @property
    def text(self) -> str:
        """The lines of the screen."""
        return "\n".join(strip.text for strip in self.app.screen._compositor.render_strips())


@asynccontextmanager
async def viewing(folder: Path, tmp_path: Path, size: tuple[int, int] = (80, 24)) -> AsyncIterator[Terminal]:
    (tmp_path / "cache").mkdir(exist_ok=True)
    app = TerminalViewer(folder, tmp_path / "cache")
    async with app.run_test(size=size) as pilot:
        terminal = Terminal(app, pilot)
        await terminal.settle()
        yield terminal


async def test_from_the_runs_to_a_transcript_and_back(folder: Path, tmp_path: Path) -> None:
    async with viewing(folder, tmp_path) as terminal:
        assert isinstance(terminal.app.screen, RunsScreen)
        assert "2 runs" in terminal.text
        await terminal.press("slash", *"digits", "enter")
        assert "empty" not in terminal.text
        await terminal.press("enter")
        assert isinstance(terminal.app.screen, RunScreen)
        assert "step 2, 7 episodes, 2 failed" in terminal.text
        assert re.search(r"reward/mean +[▁▂▃▄▅▆▇█]+ +0\.\d+ → 0\.\d+", terminal.text)
        assert re.search(r"\b2 +\[workflow\] ValueError: no tool 5 +\(2 tasks\)", terminal.text)
        await terminal.press("j", "j", "enter")
        assert "2 episodes" in terminal.text
        assert "not solved" not in terminal.text
        await terminal.press("escape", "k", "k", "enter")
        assert isinstance(terminal.app.screen, EpisodesScreen)
        assert "7 episodes" in terminal.text
        assert "What is 6 + 1?" in terminal.text
        await terminal.press("enter")
        assert isinstance(terminal.app.screen, TranscriptScreen)
        for part in ("solved", "reward 1.000", "expected answer: 7", "Answer in digits.", "seven apples", "1/7"):
            assert part in terminal.text
        await terminal.press("n")
        assert "error      [workflow] ValueError: no tool 5" in terminal.text
        await terminal.press("p", "escape", "escape", "escape")
        assert isinstance(terminal.app.screen, RunsScreen)
        await terminal.press("escape", "escape")  # ends the search, and the first screen stays
        assert "2 runs" in terminal.text
        await terminal.press("q")
    assert terminal.app.return_code == 0


async def test_search_filter_and_order(folder: Path, tmp_path: Path) -> None:
    async with viewing(folder / "digits", tmp_path, (120, 40)) as terminal:
        assert isinstance(terminal.app.screen, RunScreen)  # the folder of a run
        await terminal.press("slash", *"apples", "enter")
        assert "1 episode " in terminal.text
        assert "seven apples" in terminal.text
        await terminal.press("escape", "f")
        assert "2 episodes" in terminal.text
        assert "only failed" in terminal.text
        await terminal.press("o", "o", "f", "f", "f", "f")
        assert "7 episodes  best first" in terminal.text
        await terminal.press("question_mark")
        assert "next and previous episode" in terminal.text
        await terminal.press("x", "enter", "slash", *"digits", "enter", "escape")
        assert "Answer in digits." in terminal.text


async def test_an_active_run_is_followed(folder: Path, tmp_path: Path) -> None:
    with open_record(tmp_path / "live") as record:
        write(record, 1, an_episode(0, 1.0), an_episode(1, 0.0))
        async with viewing(tmp_path / "live", tmp_path) as terminal:
            assert "running" in terminal.text
            assert "step 1, 2 episodes" in terminal.text
            await terminal.press("enter", "j")
            write(record, 2, an_episode(2, 1.0))
            terminal.app.screen.poll()
            await terminal.settle()
            assert "3 episodes" in terminal.text
            table = terminal.app.screen.table
            assert [str(table.get_row_at(row)[0]) for row in range(3)] == ["2", "1", "1"]
            assert table.cursor_row == 2  # on the same episode


async def test_episodes_of_a_large_run_are_read_in_pages(tmp_path: Path) -> None:
    async with viewing(many_episodes(tmp_path / "large", 1000), tmp_path) as terminal:
        await terminal.press("enter")
        assert "1,000 episodes" in terminal.text
        assert terminal.app.screen.table.row_count == 200
        await terminal.press("G")
        assert terminal.app.screen.table.row_count == 400
        assert terminal.app.screen.table.cursor_row == 199
        await terminal.press("enter")  # the record has no file of this episode
        assert "No such file" in terminal.text or "cannot" in terminal.text


async def test_texts_of_models_are_shown_as_they_are(tmp_path: Path) -> None:
    name = "run [red]x[bold]"
    with open_record(tmp_path / "runs" / name) as record:
        episode = an_episode(1, None, answer=HOSTILE, question=HOSTILE)
        record.write_episode(1, "train", Episode(**{**_fields(episode), "error": HOSTILE, "error_kind": HOSTILE}))
        record.write_episode(1, "train", an_episode(2, 1.0, answer=HOSTILE, question=HOSTILE))
    async with viewing(tmp_path / "runs", tmp_path, (120, 40)) as terminal:
        seen = []
        for keys in ((), ("enter",), ("enter",), ("enter",), ("n",), ("slash", *"[/red]", "enter")):
            await terminal.press(*keys)
            seen.append(terminal.text)
            assert not _CONTROLS.search(terminal.text)
        assert name[:14] in seen[0]
        assert "[red]x[/red] [@click=app.quit]y[/] [/] ␛[2J" in seen[3]
        assert "<U+202E>gnp.exe<U+2066>" in seen[4]


def _fields(episode: Episode) -> dict[str, Any]:
    return {name: getattr(episode, name) for name in episode.__dataclass_fields__}


async def test_damaged_and_removed_records(folder: Path, tmp_path: Path) -> None:
    (folder / "digits/summary.json").write_text("{")
    (folder / "digits/episodes/index.jsonl").write_text("not JSON\n")
    async with viewing(folder, tmp_path) as terminal:
        assert "digits" in terminal.text
        await terminal.press("slash", *"digits", "enter", "enter")
        assert "0 episodes" in terminal.text
        for file in (folder / "digits").rglob("*"):
            file.is_file() and file.unlink()
        terminal.app.screen.poll()
        await terminal.settle()
        assert "there is no run 'digits'" in terminal.text


def test_the_command_names_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = CliRunner().invoke(astuner, ["view", str(folder), "--tui"])
    assert 'pip install "astuner[tui]"' in str(result.exception or result.output)


def test_the_command_needs_a_terminal(folder: Path) -> None:
    result = CliRunner().invoke(astuner, ["view", str(folder), "--tui"])
    assert "needs a terminal" in str(result.exception or result.output)
