"""Runs a share of a run's episodes in another process than the launcher's, with the very code of the local backbone."""

from __future__ import annotations

import contextlib
import os
import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from loguru import logger

from astuner.backbone.ingredients import gather_agent
from astuner.breakpoints import Breakpoints, choose
from astuner.config.root import AstunerConfig
from astuner.llm_engine.protocol import LlmEngine
from astuner.run_record import redact
from astuner.run_record.plain import to_plain
from astuner.schema import Episode
from astuner.task_rollout import BatchRequest, RunningEpisodes, report_failures


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


class EpisodeWorker:
    """Runs shares of batches, one after another."""

    def __init__(self, job: AgentJob, engine: LlmEngine) -> None:
        """Load agent and judge.

        Raises:
            AstunerError: they cannot be loaded here, e.g. since a node lacks the user's files.
        """
        # Another machine may not have it; what is named by absolute paths is found all the same.
        with contextlib.suppress(OSError):
            os.chdir(job.folder)
        choose(job.breakpoints)
        ingredients = gather_agent(job.config, job.search, job.model_path)
        self._rollout = ingredients.rollout(job.config, engine, RunningEpisodes())
        self._threads = ThreadPoolExecutor(1)

    def ready(self) -> int:
        """Return the process's id, once everything is loaded."""
        return os.getpid()

    def news(self, request: BatchRequest) -> Iterator[Episode | str | Sequence[Episode]]:
        """Yield episodes and warnings as they come, and at last the failed attempts of episodes that were run again."""
        ended: queue.SimpleQueue[Episode | str | None] = queue.SimpleQueue()
        # Ray shows the driver nothing of what is logged here; of episodes that are left out, the driver tells itself.
        sink = logger.add(
            lambda message: ended.put(str(message).rstrip()),
            level="WARNING",
            format="{message}",
            filter=lambda record: record["function"] != report_failures.__name__,
        )
        everything = self._threads.submit(self._rollout.run, request, ended.put)
        everything.add_done_callback(lambda _: ended.put(None))
        shown = set()
        while (episode := ended.get()) is not None:
            if isinstance(episode, str):
                yield episode
                continue
            shown.add(episode.episode_id)
            yield _portable(episode)
        logger.remove(sink)
        yield [_portable(episode) for episode in everything.result() if episode.episode_id not in shown]


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
