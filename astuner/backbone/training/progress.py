"""Progress of a run: one line on the console, and warnings about phases that pass their deadline."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from time import monotonic, strftime  # an episode that replaces `time.monotonic` must not end the thread of the display
from typing import Literal

from loguru import logger
from rich.console import Console
from rich.live import Live
from rich.text import Text

from astuner.config.timing import DeadlinesConfig
from astuner.debugging.breakpoints import is_debugged
from astuner.debugging.deadlines import alarm
from astuner.debugging.tracebacks import format_stack, thread_stack
from astuner.system.clock import duration_text
from astuner.task_rollout.active_episodes import ActiveEpisodes

Advance = Callable[..., None]
"""Counts units of a block as done; see `RunProgress.advance`."""
PhaseName = Literal["read_tasks", "load_model", "rollout", "update", "sync_weights", "validation", "save_checkpoint"]

_TITLES: dict[PhaseName, str] = {
    "read_tasks": "reading the tasks",
    "load_model": "loading the model",
    "rollout": "the rollout",
    "update": "the update",
    "sync_weights": "the weight sync",
    "validation": "the validation",
    "save_checkpoint": "saving",
}


_REFRESH_SECONDS = 0.5
_SECONDS_BETWEEN_LINES = 30.0
_BAR_WIDTHS = (6, 20)
_SHORTEST_RATE = 1.0  # seconds; the rate of a shorter time means nothing


@dataclass(eq=False)
class _Bar:
    """Counts the completed units of a block, and its sampled `tokens`; `RunProgress` shows the count."""

    title: str
    total: int
    done: int
    unit: str
    tokens: Callable[[], int] | None
    started: float
    note: str = ""

    def __post_init__(self) -> None:
        self._done_at_start = self.done

    def numbers(self, now: float) -> list[str]:
        """Return the count, the tokens per second, the elapsed and the remaining time, and the note."""
        elapsed = now - self.started
        # Trainers in other processes report nothing until they have ended.
        counted = f"{self.done:,}/{self.total:,}" if self.done else f"{self.total:,}"
        parts = [f"{counted} {self.unit}".strip()]
        if self.tokens is not None and elapsed >= _SHORTEST_RATE and (tokens := self.tokens()):
            parts.append(f"{tokens / elapsed:,.0f} tokens/s")
        parts.append(duration_text(elapsed))
        if self._done_at_start < self.done < self.total:
            remaining = elapsed / (self.done - self._done_at_start) * (self.total - self.done)
            parts.append(f"eta {duration_text(remaining)}")
        return [*parts, self.note] if self.note else parts


class RunProgress:
    """A run's progress, on one line of the terminal that disappears when the outermost block ends.

    If the console is not a terminal, a long block prints a line every 30 s. A thread writes both, except in a
    run whose episodes stop in the terminal's debugger: such a run prints lines between its episodes only.
    """

    def __init__(self, console: Console, *, shown: bool = True, clock: Callable[[], float] = monotonic) -> None:
        """Create the display. A debugger may read from the terminal unless it is `shown`; `clock` returns seconds."""
        self.console = console
        self._has_thread = shown
        self._clock = clock
        self._bars: list[_Bar] = []
        self._last_line = clock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._live: Live | None = None

    @contextlib.contextmanager
    def bar(
        self, title: str, total: int, done: int = 0, *, unit: str = "", tokens: Callable[[], int] | None = None
    ) -> Iterator[Advance]:
        """Show the progress of the block. An inner bar replaces the outer bar until it ends.

        Yields a function that counts units of this block, even while an inner bar is shown (see `advance`).
        `tokens` returns the tokens sampled since the start of the block; another thread calls it.
        """
        bar = _Bar(title, total, done, unit, tokens, self._clock())
        self._bars.append(bar)
        if len(self._bars) == 1:
            self._start()
        self._show_change()
        try:
            yield partial(self._advance, bar)
        finally:
            self._bars.remove(bar)
            self._show_change()
            if not self._bars:
                self._ended.set()
                if self._thread is not None:
                    self._thread.join()
                if self._live is not None:
                    self._live.stop()
                self._thread = self._live = None

    def advance(self, count: int = 1, note: str | None = None) -> None:
        """Count units of the innermost block as done; `note` replaces the text after the numbers."""
        self._advance(self._bars[-1], count, note)

    def _advance(self, bar: _Bar, count: int = 1, note: str | None = None) -> None:
        bar.done += count
        if note is not None:
            bar.note = note
        if not self._has_thread:
            self.refresh()

    def refresh(self) -> None:
        """Show the current numbers: rewrite the terminal's line, or print a line if the last one is 30 s old."""
        if self._live is not None:
            self._live.refresh()
            return
        now, bars = self._clock(), self._bars[-1:]
        if now - self._last_line < _SECONDS_BETWEEN_LINES or (self._has_thread and is_debugged()):
            return
        self._last_line = now
        for bar in bars:
            numbers = ", ".join(bar.numbers(now))
            self.console.print(f"{strftime('%H:%M:%S')} {bar.title}: {numbers}", markup=False, soft_wrap=True)

    def _start(self) -> None:
        if not self._has_thread:
            return
        if self.console.is_terminal:  # a pipe or a file would get escape codes and empty lines
            self._live = Live(console=self.console, get_renderable=self._line, auto_refresh=False, transient=True)
            self._live.start()
        self._ended.clear()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(_REFRESH_SECONDS):
            self.refresh()

    def _show_change(self) -> None:
        """Show another bar. Where lines are printed, the next one follows after 30 s of this bar."""
        self._last_line = self._clock()
        if self._live is not None:
            self._live.refresh()

    def _line(self) -> Text:
        bars = self._bars[-1:]
        line = Text(no_wrap=True, overflow="ellipsis", end="")
        for bar in bars:
            numbers = "  ".join(bar.numbers(self._clock()))
            room = self.console.width - len(bar.title) - len(numbers) - 5
            line.append(bar.title, style="bold")
            narrowest, widest = _BAR_WIDTHS
            if room >= narrowest and bar.total:
                width = min(room, widest)
                filled = min(round(width * bar.done / bar.total), width)
                line.append("  ").append("━" * filled, style="green").append("━" * (width - filled), style="dim")
            line.append(f"  {numbers}")
        return line


def warn_if_slow(
    phase: PhaseName, deadlines: DeadlinesConfig, active_episodes: ActiveEpisodes
) -> contextlib.AbstractContextManager[None]:
    """Log a warning each time the block takes another multiple of the phase's deadline. The block is not interrupted.

    The warning lists the running episodes with their last LLM call and their stack, or, if none runs, the stack of the
    calling thread.
    """
    seconds: float | None = getattr(deadlines, phase)
    thread = threading.current_thread()

    def warn(elapsed: float) -> None:
        if active_episodes:
            where = active_episodes.report()
        else:
            where = f"the stack of {thread.name}:\n{format_stack(thread_stack(thread))}"
        logger.warning(
            "{} has taken {:.4g} s, longer than astuner.deadlines.{} ({:g} s), and continues: {}",
            _TITLES[phase], elapsed, phase, seconds, where,
        )  # fmt: skip

    return alarm(seconds, warn, repeat=True)
