"""What a worker process needs, its messages with the process that has the engine, and the events of a batch's shares.

A frame of the socket is its length (4 bytes, big-endian) and a pickled message.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from astuner.backbone.training.run_inputs import RunInputs
from astuner.config.root import AstunerConfig
from astuner.debugging.breakpoints import Breakpoints, active_breakpoints, set_breakpoints
from astuner.env_service.addresses import EnvServiceAddress
from astuner.errors import AstunerError
from astuner.model_tuner.chat_options import CallSettings
from astuner.schema import Completion, Episode, LlmCall, SamplingParams, WorkflowTask
from astuner.system.redaction.output import redact_output
from astuner.task_rollout.active_episodes import RunningReport

if TYPE_CHECKING:
    from loguru import Message

    from astuner.task_judge.rubrics_auto_grader.grader import Rubrics


@dataclass(frozen=True)
class AgentJob:
    """Inputs of a process that runs episodes.

    Attributes:
        config: the configuration, with this process's share of `rollout.max_env_worker`.
        search: folders that contain the user's code.
        folder: the working directory of the run; paths in the user's code may be relative to it.
        env_services: the environment services by their addresses as configured.
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
        """Return the inputs for a process of this run; `model_path` defaults to that in `run_inputs`."""
        return AgentJob(
            config,
            run_inputs.search,
            Path.cwd(),
            model_path or run_inputs.model_path,
            active_breakpoints(),
            env_services=run_inputs.env_services,
            rubrics=run_inputs.rubrics,
        )

    def prepare_process(self) -> None:
        """Redact the output of this process, which Ray writes to files, enter the folder, and enable breakpoints."""
        redact_output()
        # Another machine may lack this folder; absolute paths work without it.
        with contextlib.suppress(OSError):
            os.chdir(self.folder)
        set_breakpoints(self.breakpoints)


_LEVELS = ("TRACE", "DEBUG", "INFO", "SUCCESS", "WARNING", "ERROR", "CRITICAL")
DISCONNECTED = 113
"""Exit code of a worker whose episode has closed the connection to the main process."""


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


def as_log_record(message: Message) -> LogRecord:
    """Return a record of this process's log."""
    level = message.record["level"]
    return LogRecord(level.name if level.name in _LEVELS else level.no, str(message).rstrip())


@dataclass(frozen=True)
class RunEpisode:
    """To the worker: run an episode. A request to the engine has at most `max_model_len` tokens."""

    task: WorkflowTask
    settings: CallSettings
    policy_version: int
    max_model_len: int


@dataclass(frozen=True)
class JudgeGroup:
    """To the worker: judge the episodes of one task, each with its task."""

    tasks: Sequence[WorkflowTask]
    episodes: Sequence[Episode]


@dataclass(frozen=True)
class ReportRequest:
    """To the worker: send a `RunningReport`."""


@dataclass(frozen=True)
class AbandonEpisode:
    """To the worker: release what the running episode uses, and send it as failed. The worker is then killed."""


@dataclass(frozen=True)
class GenerateAnswer:
    """To the worker: the result of the `GenerateRequest` with this number."""

    number: int
    result: Completion | AstunerError


@dataclass(frozen=True)
class GenerateRequest:
    """From the worker: sample a completion. See `LlmEngine.generate`."""

    number: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True)
class GenerateCancelled:
    """From the worker: the `GenerateRequest` with this number needs no answer."""

    number: int


@dataclass(frozen=True)
class WorkerReady:
    """From the worker: the agent is loaded, or cannot be."""

    secrets: dict[str, str]
    error: AstunerError | None = None


@dataclass(frozen=True)
class EpisodesEnded:
    """From the worker: an episode has ended, after `RunEpisode`, or a group is judged, after `JudgeGroup`.

    Attributes:
        episodes: the episodes; none if the user quit the debugger, or astuner failed.
        reached: the tags of the `bp(tag)` calls that the process has reached.
        error: the traceback of a failure of astuner.
    """

    episodes: Sequence[Episode]
    reached: frozenset[str]
    error: str | None = None


ToWorker = RunEpisode | JudgeGroup | AbandonEpisode | ReportRequest | GenerateAnswer
FromWorker = WorkerReady | GenerateRequest | GenerateCancelled | LlmCall | LogRecord | RunningReport | EpisodesEnded
