"""The progress of a run: one line of the terminal, or a line every 30 s where there is no terminal."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from astuner.backbone.training import progress as progress_module
from astuner.backbone.training.progress import RunProgress


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def _terminal(width: int) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, highlight=False)


def _written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_line_has_count_speed_times_and_note():
    console, clock = _terminal(110), Clock()
    progress = RunProgress(console, clock=clock)
    with progress.bar("step 3/32: rollout", 64, unit="episodes", tokens=lambda: 1234 * 8):
        clock.now += 8
        progress.advance(note="reward 0.25")
        progress.advance(15)
        line = progress._line().plain
    assert line.startswith("step 3/32: rollout  ━━")
    assert line.endswith("━  16/64 episodes  1,234 tokens/s  0:08  eta 0:24  reward 0.25")


@pytest.mark.parametrize("width", [80, 40])
def test_the_line_is_one_line_of_the_terminal(width: int):
    console, clock = _terminal(width), Clock()
    progress = RunProgress(console, clock=clock)
    with progress.bar("step 120/400: rollout", 640, unit="episodes", tokens=lambda: 10**7):
        clock.now += 5000
        progress.advance(99, note="reward 0.25")
        progress.refresh()
        (line,) = console.render_lines(progress._line(), pad=False)
        assert sum(segment.cell_length for segment in line) <= width


def test_an_inner_block_replaces_the_line_until_it_ends():
    console, clock = _terminal(80), Clock()
    progress = RunProgress(console, clock=clock)
    with progress.bar("training", 4, done=1, unit="steps"):
        with progress.bar("step 2/4: update", 8, unit="samples"):
            assert progress._line().plain.endswith("8 samples  0:00")
            progress.advance(3)
            assert progress._line().plain.startswith("step 2/4: update")
        progress.advance()
        assert "2/4 steps" in progress._line().plain
    assert progress._thread is None
    assert "\x1b[2K" in _written(console)[-20:]  # the line is erased


def test_streams_are_restored_and_printed_lines_stay_above():
    console = _terminal(80)
    before = sys.stdout, sys.stderr
    with RunProgress(console).bar("dry run", 4, unit="episodes"):
        console.print("a line of the log")
    assert (sys.stdout, sys.stderr) == before
    assert "a line of the log\n" in _written(console)


def test_without_a_terminal_a_block_prints_a_line_every_30_seconds_only():
    console, clock = Console(file=io.StringIO(), width=80), Clock()
    progress = RunProgress(console, clock=clock)
    with progress.bar("training", 2, unit="steps"):
        for _ in range(2):
            with progress.bar("step 1/2: rollout", 64, unit="episodes", tokens=lambda: 350):
                clock.now += 29
                progress.refresh()
    assert _written(console) == ""
    with progress.bar("step 2/2: rollout", 64, unit="episodes", tokens=lambda: 350):
        for _ in range(14):
            clock.now += 5
            progress.advance(2)
            progress.refresh()
    lines = _written(console).splitlines()
    assert [line[9:] for line in lines] == [
        "step 2/2: rollout: 12/64 episodes, 12 tokens/s, 0:30, eta 2:10",
        "step 2/2: rollout: 24/64 episodes, 6 tokens/s, 1:00, eta 1:40",
    ]


def test_a_run_in_the_debugger_has_no_thread_and_prints_between_episodes_only():
    console, clock = _terminal(80), Clock()
    progress = RunProgress(console, shown=False, clock=clock)
    with progress.bar("dry run", 4, unit="episodes"):
        assert progress._thread is None
        clock.now += 45
        assert _written(console) == ""  # at a prompt
        progress.advance()
    assert _written(console)[9:] == "dry run: 1/4 episodes, 0:45, eta 2:15\n"


def test_an_attached_debugger_stops_the_lines(monkeypatch: pytest.MonkeyPatch):
    console, clock = Console(file=io.StringIO(), width=80), Clock()
    progress = RunProgress(console, clock=clock)
    monkeypatch.setattr(progress_module, "is_debugged", lambda: True)
    with progress.bar("step 1/1: rollout", 4, unit="episodes"):
        clock.now += 100
        progress.refresh()
    assert _written(console) == ""
