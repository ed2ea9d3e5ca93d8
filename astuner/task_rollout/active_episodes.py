"""The running episodes, with the last LLM call and the stack of each."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import uuid4

from astuner.debugging.tracebacks import format_stack, task_stack
from astuner.errors import shorten
from astuner.system.clock import timestamp

if TYPE_CHECKING:
    from astuner.model_tuner.tuner import ModelTuner

_current_key: ContextVar[str | None] = ContextVar("astuner_episode", default=None)


def current_episode() -> str | None:
    """Return a key of the caller's episode, unique across processes; None outside an episode."""
    return _current_key.get()


@dataclass(frozen=True, eq=False)
class _ActiveEpisode:
    episode_id: str
    tuner: ModelTuner
    describe: Callable[[], str]
    started: float
    task: asyncio.Task[object]
    thread: threading.Thread

    def lines(self) -> Iterator[str]:
        yield f"{shorten(self.episode_id)}: for {timestamp() - self.started:.1f} s, {self.describe()}, at"
        yield format_stack(task_stack(self.task, self.thread))
        # The other tasks of the episode's event loop, for example those of `asyncio.gather`.
        for task in asyncio.all_tasks(self.task.get_loop()):
            if task is not self.task:
                yield "  and a task that it started, at"
                yield format_stack(task_stack(task, self.thread))


@dataclass(frozen=True)
class RunningReport:
    """One process's running episodes: their number; id, running time, LLM calls and Python stack of each."""

    episodes: int
    lines: tuple[str, ...]


FetchReports = Callable[[], Sequence[RunningReport]]


class ActiveEpisodes:
    """The set of running episodes. Thread-safe."""

    def __init__(self) -> None:
        self._running: dict[_ActiveEpisode, None] = {}
        self._fetch_reports: FetchReports | None = None
        self._remote_tokens: Callable[[], int] = lambda: 0

    @contextlib.contextmanager
    def track(self, episode_id: str, tuner: ModelTuner, describe: Callable[[], str]) -> Iterator[None]:
        """Register the episode of the current task during the block; `describe` returns a text about its LLM calls."""
        task = asyncio.current_task()
        assert task is not None
        episode = _ActiveEpisode(episode_id, tuner, describe, timestamp(), task, threading.current_thread())
        self._running[episode] = None
        token = _current_key.set(f"{episode_id}-{uuid4().hex}")
        try:
            yield
        finally:
            _current_key.reset(token)
            del self._running[episode]

    @contextlib.contextmanager
    def include_remote(
        self, fetch_reports: FetchReports, sampled_tokens: Callable[[], int] = lambda: 0
    ) -> Iterator[None]:
        """Include the episodes of other processes during the block.

        Args:
            fetch_reports: returns the reports of those processes within seconds; called from any thread.
            sampled_tokens: returns the number of tokens that their running episodes have sampled, in ended calls.
        """
        self._fetch_reports, self._remote_tokens = fetch_reports, sampled_tokens
        try:
            yield
        finally:
            self._fetch_reports, self._remote_tokens = None, lambda: 0

    def __bool__(self) -> bool:
        """Return whether any episode runs; True while episodes of other processes are included."""
        return bool(self._running) or self._fetch_reports is not None

    def sampled_tokens(self) -> int:
        """Return the number of tokens that the running episodes have sampled, in ended calls, as far as it is known."""
        return self._remote_tokens() + sum(
            len(call.completion_ids) for episode in list(self._running) for call in episode.tuner.calls
        )

    def local_report(self) -> RunningReport:
        """Return the report of this process."""
        episodes = list(self._running)
        return RunningReport(len(episodes), tuple(line for episode in episodes for line in episode.lines()))

    def report(self) -> str:
        """Return a text with the id, running time, LLM calls and Python stack of each running episode."""
        fetch_reports = self._fetch_reports
        reports = [self.local_report(), *(fetch_reports() if fetch_reports is not None else ())]
        count = sum(report.episodes for report in reports)
        title = f"{count} episode{'' if count == 1 else 's'} running"
        return "\n".join([title, *(line for report in reports for line in report.lines)])
