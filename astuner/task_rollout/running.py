"""The episodes that run at the moment, and what each of them is at."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from uuid import uuid4

from astuner.model_tuner import ModelTuner
from astuner.stacks import Stack, shown, task_stack
from astuner.task_runner import last_call

_CURRENT: ContextVar[str | None] = ContextVar("astuner_episode", default=None)


def current_episode() -> str | None:
    """Return the key of the episode that the caller belongs to, of no other one in any process; None outside of any."""
    return _CURRENT.get()


@dataclass(frozen=True, eq=False)
class _Running:
    episode_id: str
    tuner: ModelTuner
    started: float
    task: asyncio.Task[object]
    thread: threading.Thread

    def lines(self) -> Iterator[str]:
        yield f"{self.episode_id}: for {time.time() - self.started:.1f} s, {last_call(self.tuner)}, standing at"
        yield shown(task_stack(self.task, self.thread))
        for stack in self._helpers():
            yield "  and a task that it started, at"
            yield shown(stack)

    def _helpers(self) -> Iterator[Stack]:
        """The stacks of the other tasks of the episode's loop: those of a `gather`, for instance."""
        for task in asyncio.all_tasks(self.task.get_loop()):
            if task is not self.task:
                yield task_stack(task, self.thread)


@dataclass(frozen=True)
class RunningReport:
    """What one process says of the episodes that run in it.

    Attributes:
        episodes: how many.
        lines: of each its id, since when it runs, its last finished call, and its Python stack.
    """

    episodes: int
    lines: tuple[str, ...]


AskOthers = Callable[[], Sequence[RunningReport]]


class RunningEpisodes:
    """Knows which episodes run, from any thread."""

    def __init__(self) -> None:
        self._running: dict[_Running, None] = {}
        self._ask_others: AskOthers | None = None

    @contextlib.contextmanager
    def entered(self, episode_id: str, tuner: ModelTuner) -> Iterator[None]:
        """Count an episode as running during the block, in its own task."""
        task = asyncio.current_task()
        assert task is not None
        running = _Running(episode_id, tuner, time.time(), task, threading.current_thread())
        self._running[running] = None
        token = _CURRENT.set(f"{episode_id}-{uuid4().hex}")
        try:
            yield
        finally:
            _CURRENT.reset(token)
            del self._running[running]

    @contextlib.contextmanager
    def elsewhere(self, ask: AskOthers) -> Iterator[None]:
        """Count episodes of other processes, too, during the block.

        Args:
            ask: gives what those processes say, within seconds; called from any thread.
        """
        self._ask_others = ask
        try:
            yield
        finally:
            self._ask_others = None

    def __bool__(self) -> bool:
        """Whether any runs; those of other processes are taken to."""
        return bool(self._running) or self._ask_others is not None

    def here(self) -> RunningReport:
        """Say of each episode that runs in this process what it is at."""
        running = list(self._running)
        return RunningReport(len(running), tuple(line for episode in running for line in episode.lines()))

    def report(self) -> str:
        """Say of each running episode: its id, since when it runs, its last finished call, and its Python stack."""
        ask = self._ask_others
        reports = [self.here(), *(ask() if ask is not None else ())]
        count = sum(report.episodes for report in reports)
        title = f"{count} episode{'' if count == 1 else 's'} running"
        return "\n".join([title, *(line for report in reports for line in report.lines)])
