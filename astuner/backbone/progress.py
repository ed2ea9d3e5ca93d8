"""Progress bars for the phases of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as Remaining


class Phase:
    """One bar."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def advance(self, note: str | None = None) -> None:
        """Move on by one, with a short note beside the bar."""
        self._progress.advance(self._task)
        if note is not None:
            self._progress.update(self._task, note=note)


class RunProgress:
    """The bars of one run, on one console that is a terminal; a bar disappears when its phase ends."""

    def __init__(self, console: Console, *, shown: bool = True) -> None:
        """Make the bars; without `shown` there are none, as they would draw over a debugger's prompt."""
        self.console = console
        self._progress = Progress(
            TextColumn("{task.description}", style="bold"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            Remaining(),
            TextColumn("{task.fields[note]}", style="dim"),
            console=console,
            transient=True,
            disable=not (shown and console.is_terminal),  # a pipe or a file would get escape codes and empty lines
        )
        self._open = 0

    @contextlib.contextmanager
    def phase(self, name: str, total: int, done: int = 0) -> Iterator[Phase]:
        """Show a bar while the block runs."""
        if self._open == 0:
            self._progress.start()
        self._open += 1
        task = self._progress.add_task(name, total=total, completed=done, note="")
        try:
            yield Phase(self._progress, task)
        finally:
            self._progress.remove_task(task)
            self._open -= 1
            if self._open == 0:
                self._progress.stop()
