"""Progress of a run: bars on the terminal, and warnings about phases that pass their deadline."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Literal

from loguru import logger
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from astuner.config.timing import DeadlinesConfig
from astuner.debugging.deadlines import alarm
from astuner.debugging.tracebacks import format_stack, thread_stack
from astuner.task_rollout import ActiveEpisodes

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


class ProgressBar:
    """A progress bar that `RunProgress` shows."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def advance(self, note: str | None = None) -> None:
        """Advance by one, and show `note` next to the bar."""
        self._progress.advance(self._task)
        if note is not None:
            self._progress.update(self._task, note=note)


class RunProgress:
    """The progress bars of one run. A bar disappears when its block ends."""

    def __init__(self, console: Console, *, shown: bool = True) -> None:
        """Create the bars on `console`, if it is a terminal; `shown=False` disables them, e.g. under a debugger."""
        self.console = console
        self._progress = Progress(
            TextColumn("{task.description}", style="bold"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", style="dim"),
            console=console,
            transient=True,
            disable=not (shown and console.is_terminal),  # a pipe or a file would get escape codes and empty lines
        )
        self._open = 0

    @contextlib.contextmanager
    def bar(self, title: str, total: int, done: int = 0) -> Iterator[ProgressBar]:
        """Show a bar with `title` while the block runs; `done` of `total` units are complete at the start."""
        if self._open == 0:
            self._progress.start()
        self._open += 1
        task = self._progress.add_task(title, total=total, completed=done, note="")
        try:
            yield ProgressBar(self._progress, task)
        finally:
            self._progress.remove_task(task)
            self._open -= 1
            if self._open == 0:
                self._progress.stop()


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
