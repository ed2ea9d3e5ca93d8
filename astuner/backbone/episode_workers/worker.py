"""Runs a share of the episodes in a worker process, with the same code as the local backbone."""

from __future__ import annotations

import contextlib
import os
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from loguru import logger

from astuner.backbone.training.run_inputs import RunInputs, load_agent_inputs
from astuner.config.root import AstunerConfig
from astuner.debugging.breakpoints import Breakpoints, active_breakpoints, reached_tags, set_breakpoints
from astuner.env_service.addresses import EnvServiceAddress
from astuner.helper_llm.shared import share_limits
from astuner.llm_engine.protocol import LlmEngine
from astuner.model_tuner import CallSettings, ChatCodec
from astuner.run_record.jsonable import to_jsonable
from astuner.schema import Episode, LlmCall, WorkflowTask
from astuner.system.redaction import redact, secret_variables
from astuner.system.redaction.output import redact_output
from astuner.task_rollout import ActiveEpisodes, BatchRequest, RunningReport, report_failures

if TYPE_CHECKING:
    from loguru import Message

    from astuner.task_judge.rubrics_auto_grader import Rubrics

_LEVELS = ("TRACE", "DEBUG", "INFO", "SUCCESS", "WARNING", "ERROR", "CRITICAL")


@dataclass(frozen=True)
class AgentJob:
    """Inputs of a process that runs episodes.

    Attributes:
        config: the configuration, with this process's share of `rollout.max_env_worker`.
        search: folders that contain the user's code.
        folder: the working directory of the run; paths in the user's code may be relative to it.
        model_path: the model, whose tokenizer is loaded.
        breakpoints: the breakpoints of `--db`.
        env_services: the environment services by their addresses as configured.
        rubrics: the learned rubrics of the judge; None if it has none.
        limits: folder of the limits that this process shares with others (see `share_limits`); None if it shares none.
    """

    config: AstunerConfig
    search: tuple[Path, ...]
    folder: Path
    model_path: str
    breakpoints: Breakpoints
    env_services: Mapping[str, EnvServiceAddress] = field(default_factory=dict, kw_only=True)
    rubrics: Rubrics | None = field(default=None, kw_only=True)
    limits: Path | None = field(default=None, kw_only=True)

    @staticmethod
    def of(config: AstunerConfig, run_inputs: RunInputs, model_path: str | None = None) -> AgentJob:
        """Return a process's inputs for the run of this process; `model_path` defaults to that of `run_inputs`."""
        return AgentJob(
            config,
            run_inputs.search,
            Path.cwd(),
            model_path or run_inputs.model_path,
            active_breakpoints(),
            env_services=run_inputs.env_services,
            rubrics=run_inputs.rubrics,
        )


@dataclass(frozen=True)
class LogRecord:
    """A worker process's log record, for the run's log. Ray does not forward it to the driver.

    Attributes:
        level: the name of the level, or its number if it is not one of loguru's default levels.
        text: the message, with the traceback if there is one.
    """

    level: str | int
    text: str


@dataclass(frozen=True)
class BreakpointsReached:
    """The tags of the `bp(tag)` calls that a worker process has reached."""

    tags: frozenset[str]


WorkerEvent = Episode | LogRecord | BreakpointsReached | Sequence[Episode]
"""An event of a worker process. A sequence contains the failed attempts of retried episodes."""


class EpisodeWorker:
    """Runs shares of batches, one after another, and reports their state."""

    def __init__(
        self,
        job: AgentJob,
        engine: LlmEngine,
        codec: ChatCodec | None = None,
        on_call: Callable[[LlmCall], None] | None = None,
    ) -> None:
        """Load the agent and the judge.

        Args:
            job: the inputs.
            engine: the model.
            codec: the codec of that model; None to load it.
            on_call: called with each finished LLM call.

        Raises:
            AstunerError: they cannot be loaded, for example because this node lacks the user's files.
        """
        redact_output()  # Ray writes the output of this process to files
        # Another machine may lack this folder; absolute paths work without it.
        with contextlib.suppress(OSError):
            os.chdir(job.folder)
        set_breakpoints(job.breakpoints)
        share_limits(job.limits)
        run_inputs = load_agent_inputs(job.config, job.search, job.model_path, codec, job.env_services, job.rubrics)
        self._running = ActiveEpisodes()
        self._rollout = run_inputs.rollout(job.config, engine, self._running, on_call)
        self._threads = ThreadPoolExecutor(1)

    def ready(self) -> dict[str, str]:
        """Return the environment variables that contain secrets, once everything is loaded.

        A node may have secrets that the main process lacks. The main process needs them to redact what it records.
        """
        return secret_variables()

    def report(self) -> RunningReport:
        """Return the state of each episode that runs in this process. Thread-safe."""
        return self._running.local_report()

    def run_episode(self, task: WorkflowTask, settings: CallSettings) -> Episode:
        """Run one episode in this thread, once."""
        return _portable(self._rollout.run_episode(task, settings))

    def judge_group(self, tasks: Sequence[WorkflowTask], episodes: Sequence[Episode]) -> list[Episode]:
        """Judge the episodes of one task, in this thread."""
        return [_portable(episode) for episode in self._rollout.judge_group(tasks, episodes)]

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
            if isinstance(event, LogRecord):
                yield event
                continue
            reported.add(event.episode_id)
            yield _portable(event)
        logger.remove(sink)
        yield BreakpointsReached(reached_tags())
        yield [_portable(episode) for episode in future.result() if episode.episode_id not in reported]


def as_log_record(message: Message) -> LogRecord:
    """Return a record of this process's log."""
    level = message.record["level"]
    return LogRecord(level.name if level.name in _LEVELS else level.no, str(message).rstrip())


def _portable(episode: Episode) -> Episode:
    """Return the episode without objects that other processes may be unable to unpickle."""
    return replace(episode, metadata=to_jsonable(episode.metadata, redact))  # type: ignore[arg-type]


def in_order(episodes: Sequence[Episode], request: BatchRequest) -> list[Episode]:
    """Return episodes by task and then repeat. A retried episode is preceded by its failed attempts."""
    position = {task.task_id: index for index, task in enumerate(request.tasks)}
    return sorted(episodes, key=lambda e: (position[e.task.task_id], e.repeat_index, _attempt(e)))


def _attempt(episode: Episode) -> int:
    _, mark, number = episode.episode_id.rpartition("#")
    return int(number) if mark and number.isdecimal() else 1
