"""The record of one run: the files that a run writes to `launcher_record/{experiment}/`.

environment.json    revision, versions, machine, command line
config.yaml         the resolved configuration
run.log             the log
services/           output of the run's services (see `astuner.processes.guarded_process`)
metrics.jsonl       metrics, one line per call of `log_metrics`
diagnostics.jsonl   findings of the checks, if there are any
tensorboard/        the same for TensorBoard
episodes/           one file per episode, and index.jsonl
plots/              reward.png, loss.png (see `plot_run`)
summary.json        the result of the run
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from loguru import logger

from astuner.run_record.episode_file import EpisodeLabels
from astuner.run_record.episodes import EpisodeStore
from astuner.run_record.files import write_errors
from astuner.run_record.findings import FindingsFile, RunFinding
from astuner.run_record.folder import FolderLock, prepare_folder, write_config, write_environment
from astuner.run_record.loggers import LoggerName, RunName, check_loggers, open_loggers
from astuner.run_record.metrics import MetricLogger, MetricsFile, read_metrics
from astuner.run_record.summary import RunSummary, write_summary
from astuner.run_record.updates import SampleUpdate
from astuner.schema import Episode, Split, TokenCounts
from astuner.system.redaction.output import RedactingStream

DEFAULT_LOGGERS: tuple[LoggerName, ...] = ("console", "tensorboard")
_LOG_FORMAT = "{time:YYYY-MM-DD HH:mm:ss.SSS} | {level: <8} | {name}:{line} | {message}"
# Jobs of the writer that wait: more than those of one step. A loop that is faster than the disk waits for it.
_MAX_JOBS = 4


@dataclass(eq=False)
class RunRecord:
    """Writes the record of one run to `folder`. Secrets from the environment are redacted.

    `log_metrics` and `write_episode` are thread-safe.
    """

    folder: Path
    _metrics: MetricsFile
    _loggers: Sequence[MetricLogger]
    _episodes: EpisodeStore
    _findings: FindingsFile
    _stack: ExitStack
    _metrics_lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        backbone: str,
        config_yaml: str,
        resume: bool,
        loggers: Sequence[LoggerName] = DEFAULT_LOGGERS,
        project: str = "astuner",
        config_dir: Path | None = None,
    ) -> Self:
        """Open the record of a run that starts.

        Args:
            folder: The run's folder; its name is the experiment's.
            config_yaml: The resolved configuration.
            resume: Whether to continue the record of an earlier run (then call `truncate_after`). Otherwise the folder
                of an earlier run is renamed to `{folder}.1`, `.2`, and so on.
            loggers: Destinations of metrics in addition to `metrics.jsonl` (`trainer_common.logger`).
            project: Name that groups experiments in trackers (`project_name`).
            config_dir: The YAML file's folder, to which relative paths of the configuration may refer.

        Raises:
            ConfigError: If an experiment tracker is not installed or does not start.
            RecordError: If a live run writes to the folder, the folder holds something else, or it cannot be written.
        """
        check_loggers(loggers)
        folder = folder.absolute()
        with ExitStack() as stack:
            lock = FolderLock(folder)
            stack.callback(lock.release)
            renamed = prepare_folder(folder, resume=resume)
            # The first file: a folder that has other files only does not count as a run record.
            write_environment(folder, backbone, config_dir)
            log = LogFile(folder)
            stack.callback(log.close)
            write_config(folder, config_yaml)
            if renamed is not None:
                logger.info("moved the earlier run of {} to {}", folder.name, renamed)
            metrics = MetricsFile(folder)
            stack.callback(metrics.close)
            episodes = EpisodeStore(folder)
            stack.callback(episodes.close)
            findings = FindingsFile(folder)
            stack.callback(findings.close)
            opened = []
            for each in open_loggers(loggers, RunName(project, folder.name, folder)):
                stack.callback(each.close)
                opened.append(each)
            return cls(folder, metrics, opened, episodes, findings, stack.pop_all())

    def expect_steps(self, total: int) -> None:
        """Give the loggers the run's number of training steps."""
        for each in self._loggers:
            each.expect_steps(total)

    def check_in_place(self) -> None:
        """Raise `RecordError` if the record was deleted, moved, replaced or shortened."""
        self._metrics.check_in_place()

    def truncate_after(self, step: int, validated: int | None = None) -> None:
        """Remove what the resumed run repeats: metrics and episodes of later steps.

        Args:
            step: The last step whose training is kept.
            validated: The last step whose validation is kept; None for `step`, -1 for no validation.

        Raises:
            RecordError: If they cannot be removed.
        """
        validated = step if validated is None else validated
        lines = self._metrics.truncate_after(step, validated)
        episodes = self._episodes.truncate_after(step, validated)
        self._findings.truncate_after(max(step, 0))  # those of the start are found before
        rows = read_metrics(self.folder)
        for each in self._loggers:
            each.restart(rows)
        if lines or episodes:
            logger.info("resumed after step {}: removed {} metrics lines and {} episodes", step, lines, episodes)

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics of a step. A step may be logged in several parts.

        NaN and infinities are recorded as null, with one warning for each name.

        Raises:
            RecordError: If they cannot be written.
        """
        with self._metrics_lock:
            finite = self._metrics.log(step, metrics)
            for each in self._loggers:
                each.log(step, finite)

    def write_finding(self, finding: RunFinding) -> None:
        """Record a finding of a check; `RecordError` if that fails."""
        self._findings.write(finding)

    def write_episode(
        self,
        step: int,
        split: Split,
        episode: Episode,
        advantage: float | None = None,
        tokens: TokenCounts | None = None,
        updates: Sequence[SampleUpdate] = (),
    ) -> Path:
        """Write an episode's file and its index line, and return the file's path.

        Trainers write the episodes of a training step with `begin_step` and `end_step` instead.

        Args:
            step, split, advantage, tokens: As in `EpisodeLabels`.
            episode: The finished episode.
            updates: The training of each sample; empty if unknown or untrained.

        Raises:
            RecordError: If the episode cannot be written.
        """
        return self._episodes.write(episode, EpisodeLabels(step, split, advantage, tokens), updates)

    def begin_step(self, step: int, episodes: Sequence[tuple[Episode, TokenCounts]]) -> None:
        """Write a training step's episodes before its update; see `EpisodeStore.begin_step`."""
        self._episodes.begin_step(step, episodes)

    def end_step(self, advantages: Mapping[str, float], updates: Mapping[str, Sequence[SampleUpdate]]) -> None:
        """Add the update's results to the episodes of `begin_step`; see `EpisodeStore.end_step`."""
        self._episodes.end_step(advantages, updates)

    def write_summary(self, summary: RunSummary) -> Path:
        """Write `summary.json` and return its path; `RecordError` if that fails."""
        return write_summary(self.folder, summary)

    def close(self) -> None:
        """Close files, trackers and log, and release the folder. Later calls do nothing."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class LogFile:
    """Appends loguru's records of level DEBUG and above to `run.log`."""

    def __init__(self, folder: Path) -> None:
        """Open the log in the run's `folder`; `RecordError` if that fails."""
        path = folder / "run.log"
        with write_errors(path):
            self._file = path.open("a", encoding="utf-8", errors="backslashreplace")
        self._handler = logger.add(
            RedactingStream(self._file),
            format=_LOG_FORMAT,
            level="DEBUG",
            colorize=False,
            backtrace=False,
            diagnose=False,
        )

    def close(self) -> None:
        """Stop logging to the file and close it."""
        try:
            logger.remove(self._handler)
        except ValueError:
            logger.debug("the handler of {} was already removed", self._file.name)
        try:
            self._file.close()
        except OSError as error:  # Buffered records did not fit on the disk; the stream has reported it.
            logger.debug("closing {}: {}", self._file.name, error)


class StepWriter:
    """Writes the episodes and metrics of training steps to a record, in order, in its own thread.

    The metrics of a step are written after its episodes, and the step is done when they are written. A kill therefore
    loses no episode of a step that is done. Call `flush` before a checkpoint is written, because a resumed run
    continues after it. Each method raises the `RecordError` of an earlier job.
    """

    def __init__(self, record: RunRecord) -> None:
        self._waited = 0.0
        self._record = record
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(_MAX_JOBS)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._write, name="run-record", daemon=True)
        self._thread.start()

    def begin_step(self, step: int, episodes: Sequence[tuple[Episode, TokenCounts]]) -> None:
        """Write the episodes of a step, whose update has not begun; see `RunRecord.begin_step`."""
        self.flush()  # so that no more than the episodes of one step are in memory
        self.when_written(lambda: self._record.begin_step(step, episodes))

    def end_step(
        self,
        step: int,
        metrics: Mapping[str, float],
        advantages: Mapping[str, float],
        updates: Mapping[str, Sequence[SampleUpdate]],
    ) -> None:
        """Add the update's results to the episodes of `begin_step`, and write the step's metrics."""

        def write() -> None:
            self._record.end_step(advantages, updates)
            self._record.log_metrics(step, metrics)

        self.when_written(write)

    def when_written(self, action: Callable[[], None]) -> None:
        """Call `action` in the thread of the writer as soon as all earlier steps are written."""
        self._raise_error()
        started = time.perf_counter()
        self._jobs.put(action)
        self._waited += time.perf_counter() - started

    def seconds_waited(self) -> float:
        """Return the seconds for which the caller has waited for the record since the last call."""
        waited, self._waited = self._waited, 0.0
        return waited

    def flush(self) -> None:
        """Wait until all jobs are done; raise the error of one that failed."""
        started = time.perf_counter()
        self._jobs.join()
        self._waited += time.perf_counter() - started
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _write(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if self._error is None:  # later jobs need the results of the failed one
                    job()
            except BaseException as error:  # is raised in the thread of the loop
                self._error = error
            finally:
                del job  # frees the episodes
                self._jobs.task_done()
        self._jobs.task_done()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Write what is left, and end the thread; raise the error of a job unless the block has raised one."""
        self._jobs.put(None)
        self._thread.join()
        if error is None:
            self._raise_error()
