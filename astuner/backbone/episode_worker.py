"""Runs a share of a run's episodes in another process than the launcher's, with the very code of the local backbone."""

from __future__ import annotations

import contextlib
import os
import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from loguru import logger

from astuner.backbone.ingredients import gather_agent
from astuner.breakpoints import Breakpoints, choose, reached
from astuner.config.root import AstunerConfig
from astuner.llm_engine.protocol import LlmEngine
from astuner.run_record import redact, redact_output, secret_variables
from astuner.run_record.plain import to_plain
from astuner.schema import Episode
from astuner.task_rollout import BatchRequest, RunningEpisodes, RunningReport, report_failures

if TYPE_CHECKING:
    from loguru import Message

_LEVELS = ("TRACE", "DEBUG", "INFO", "SUCCESS", "WARNING", "ERROR", "CRITICAL")


@dataclass(frozen=True)
class AgentJob:
    """What every process that runs episodes is given.

    Attributes:
        config: the run's, with this process's share of `rollout.max_env_worker`.
        search: where the user's code is looked for.
        folder: the run's working directory, which paths in the user's code may be relative to.
        model_path: for the tokenizer.
        breakpoints: those chosen by `--db`.
    """

    config: AstunerConfig
    search: tuple[Path, ...]
    folder: Path
    model_path: str
    breakpoints: Breakpoints


@dataclass(frozen=True)
class Said:
    """A record of a worker's log, for that of the run: Ray shows the driver nothing of it.

    Attributes:
        level: its name, or its number where it is none of loguru's own.
        text: with its traceback, if it has one.
    """

    level: str | int
    text: str


@dataclass(frozen=True)
class Reached:
    """The tags `bp(tag)` that a process has come to."""

    tags: frozenset[str]


News = Episode | Said | Reached | Sequence[Episode]
"""What a process tells of its episodes; a sequence holds failed attempts of those that were run again."""


class EpisodeWorker:
    """Runs shares of batches, one after another, and says what they are at."""

    def __init__(self, job: AgentJob, engine: LlmEngine) -> None:
        """Load agent and judge.

        Raises:
            AstunerError: they cannot be loaded here, e.g. since a node lacks the user's files.
        """
        redact_output()  # Ray keeps it
        # Another machine may not have it; what is named by absolute paths is found all the same.
        with contextlib.suppress(OSError):
            os.chdir(job.folder)
        choose(job.breakpoints)
        ingredients = gather_agent(job.config, job.search, job.model_path)
        self._running = RunningEpisodes()
        self._rollout = ingredients.rollout(job.config, engine, self._running)
        self._threads = ThreadPoolExecutor(1)

    def ready(self) -> dict[str, str]:
        """Return the variables of the environment that hold secrets, once everything is loaded.

        A node may have some that the run's own process lacks, which writes what episodes say.
        """
        return secret_variables()

    def report(self) -> RunningReport:
        """Say of each episode that runs here what it is at; any thread may ask."""
        return self._running.here()

    def news(self, request: BatchRequest) -> Iterator[News]:
        """Yield episodes and the log as they come, and at last the failed attempts of episodes that were run again."""
        ended: queue.SimpleQueue[Episode | Said | None] = queue.SimpleQueue()
        # Of episodes that are left out, the driver tells itself.
        sink = logger.add(
            lambda message: ended.put(_said(message)),
            level="DEBUG",
            format="{message}",
            diagnose=False,
            filter=lambda record: record["function"] != report_failures.__name__,
        )
        everything = self._threads.submit(self._rollout.run, request, ended.put)
        everything.add_done_callback(lambda _: ended.put(None))
        shown = set()
        while (item := ended.get()) is not None:
            if isinstance(item, Said):
                yield item
                continue
            shown.add(item.episode_id)
            yield _portable(item)
        logger.remove(sink)
        yield Reached(reached())
        yield [_portable(episode) for episode in everything.result() if episode.episode_id not in shown]


def _said(message: Message) -> Said:
    level = message.record["level"]
    return Said(level.name if level.name in _LEVELS else level.no, str(message).rstrip())


def _portable(episode: Episode) -> Episode:
    """Return the episode without objects that only this process may be able to unpickle."""
    return replace(episode, metadata=to_plain(episode.metadata, redact))  # type: ignore[arg-type]


def in_order(episodes: Sequence[Episode], request: BatchRequest) -> list[Episode]:
    """Return episodes by task and then repeat; one that was run again is preceded by its attempts."""
    place = {task.task_id: index for index, task in enumerate(request.tasks)}
    return sorted(episodes, key=lambda e: (place[e.task.task_id], e.repeat_index, _attempt(e)))


def _attempt(episode: Episode) -> int:
    _, mark, number = episode.episode_id.rpartition("#")
    return int(number) if mark and number.isdecimal() else 1
