"""Runs shares of a batch in worker processes on Ray nodes, again if a host is lost, and orders the episodes."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from loguru import logger

from astuner.backbone.episode_workers.messages import (
    AgentJob,
    BreakpointsReached,
    LogRecord,
    WorkerEvent,
    as_log_record,
)
from astuner.backbone.episode_workers.pool import started_pool
from astuner.backbone.ray_cluster.nodes import ActorLostError
from astuner.config.root import AstunerConfig
from astuner.debugging.breakpoints import is_debugged, reached_tags
from astuner.errors import first_line
from astuner.llm_engine.protocol import LlmEngine
from astuner.schema import Episode
from astuner.system.redaction.redactor import secret_variables
from astuner.task_rollout.active_episodes import RunningReport
from astuner.task_rollout.rollout import BatchRequest, TaskRollout, failed_episodes, report_failures

_TRIES_TOGETHER = 2
# Added to the timeouts of an episode before its host counts as stuck.
_GRACE_SECONDS = 60.0


class EpisodeHost:
    """Runs shares of batches in worker processes, one share after another, and reports their state.

    The processes end with this one.
    """

    def __init__(self, job: AgentJob, engine: LlmEngine) -> None:
        """Start the first worker process, which loads agent and judge; raise AstunerError if it cannot load them."""
        job.prepare_process()
        # A debugger attaches to one process.
        workers = 1 if is_debugged() else job.config.rollout.max_env_worker
        self._processes = contextlib.ExitStack()  # Ray kills this process, so that it is never closed
        pool = self._processes.enter_context(started_pool(job, workers))
        pool.engine = engine
        self._rollout = TaskRollout(pool, job.config.rollout.max_retries)
        self._reports = pool.reports
        self._threads = ThreadPoolExecutor(1)

    def ready(self) -> dict[str, str]:
        """Return the environment variables that contain secrets, once everything is loaded.

        A node may have secrets that the main process lacks. The main process needs them to redact what it records.
        """
        return secret_variables()

    def report(self) -> RunningReport:
        """Return the state of each running episode. Thread-safe."""
        reports = self._reports()
        return RunningReport(
            sum(report.episodes for report in reports), tuple(line for report in reports for line in report.lines)
        )

    def run_episodes(self, request: BatchRequest) -> Iterator[WorkerEvent]:
        """Run episodes. Yield finished episodes, log records, and at the end failed attempts of retried episodes."""
        events: queue.SimpleQueue[Episode | LogRecord | None] = queue.SimpleQueue()
        # The driver reports failed episodes itself.
        sink = logger.add(
            lambda message: events.put(as_log_record(message)),
            level="DEBUG",
            format="{message}",
            diagnose=False,
            filter=lambda record: record["function"] != report_failures.__name__,
        )
        future = self._threads.submit(self._rollout.run, request, events.put)
        future.add_done_callback(lambda _: events.put(None))
        reported = set()
        while (event := events.get()) is not None:
            if isinstance(event, Episode):
                reported.add(event.episode_id)
            yield event
        logger.remove(sink)
        yield BreakpointsReached(reached_tags())
        yield [episode for episode in future.result() if episode.episode_id not in reported]


def longest_wait(config: AstunerConfig) -> float:
    """Return the seconds within which a host finishes an episode, unless it is stuck."""
    rollout = config.rollout
    return (rollout.episode_timeout + config.task_judge.timeout) * (rollout.max_retries + 1) + _GRACE_SECONDS


def run_share(
    share: BatchRequest, run_on_host: Callable[[BatchRequest], Iterator[WorkerEvent]]
) -> Iterator[WorkerEvent]:
    """Run a share of a batch and yield its events. Run the remaining episodes again if their host is lost.

    After two losses, the remaining episodes run one at a time, so that only those that end their host fail.

    Args:
        run_on_host: runs episodes on a host, and yields its events. If the host is lost, it raises
            ActorLostError; the next call runs on a new host.
    """
    missing = {(task.task_id, repeat) for task, repeat in share.episodes()}
    reason = ""

    def attempt(episodes: set[tuple[str, int]]) -> Iterator[WorkerEvent]:
        nonlocal reason
        try:
            for event in run_on_host(replace(share, only=frozenset(episodes))):
                if isinstance(event, Episode):
                    missing.discard((event.task.task_id, event.repeat_index))
                yield event
            reason = "it finished without this episode"
        except ActorLostError as error:
            reason = first_line(error)
            left = len(episodes & missing)
            yield LogRecord(
                "WARNING",
                f"an episode host was lost in {share.split} step {share.step} ({reason}); {left} of its episodes had "
                "not finished",
            )

    for _ in range(_TRIES_TOGETHER):
        if missing:
            yield from attempt(set(missing))
    for episode in sorted(missing):
        yield from attempt({episode})
        if episode in missing:
            error = f"its host was lost {_TRIES_TOGETHER + 1} times, the last time with only this episode: {reason}"
            yield from failed_episodes(replace(share, only=frozenset({episode})), "worker", error)


def report_batch(episodes: Sequence[Episode], request: BatchRequest) -> list[Episode]:
    """Log the failures of a batch; return its episodes by task and repeat, a retried one after its failed attempts."""
    position = {task.task_id: index for index, task in enumerate(request.tasks)}
    ordered = sorted(episodes, key=lambda e: (position[e.task.task_id], e.repeat_index, _attempt(e)))
    last_attempts = {(episode.task.task_id, episode.repeat_index): episode for episode in ordered}
    report_failures(list(last_attempts.values()), request)
    return ordered


def _attempt(episode: Episode) -> int:
    _, mark, number = episode.episode_id.rpartition("#")
    return int(number) if mark and number.isdecimal() else 1
