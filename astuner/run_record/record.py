"""The record of one run: the files that a run writes to `launcher_record/{experiment}/`.

environment.json    revision, versions, machine, command line
config.yaml         the resolved configuration
run.log             the log
services/           output of the run's services (see `astuner.processes.log`)
metrics.jsonl       metrics, one line per call of `log_metrics`
diagnostics.jsonl   findings of the checks, if there are any
tensorboard/        the same for TensorBoard
episodes/           one file per episode, and index.jsonl
plots/              reward.png, loss.png (see `plot_run`)
summary.json        the result of the run
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from loguru import logger

from astuner.run_record.episode_file import EpisodeLabels
from astuner.run_record.episodes import EpisodeStore
from astuner.run_record.findings import FindingsFile, RunFinding
from astuner.run_record.folder import FolderLock, prepare_folder, write_config, write_environment
from astuner.run_record.loggers import LoggerName, MetricLogger, RunName, check_loggers, open_loggers
from astuner.run_record.metrics import MetricsFile, read_metrics
from astuner.run_record.output import LogFile
from astuner.run_record.summary import RunSummary, write_summary
from astuner.run_record.updates import SampleUpdate
from astuner.schema import Episode, Split, TokenCounts

DEFAULT_LOGGERS: tuple[LoggerName, ...] = ("console", "tensorboard")


class RunRecord:
    """Writes the record of one run. Secrets from the environment are redacted.

    `log_metrics` and `write_episode` are thread-safe.
    """

    def __init__(
        self,
        folder: Path,
        metrics: MetricsFile,
        loggers: Sequence[MetricLogger],
        episodes: EpisodeStore,
        findings: FindingsFile,
        stack: ExitStack,
    ) -> None:
        self._folder = folder
        self._metrics = metrics
        self._metrics_lock = threading.Lock()
        self._loggers = loggers
        self._episodes = episodes
        self._findings = findings
        self._stack = stack

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
            folder: The run's folder; its name is the name of the experiment.
            backbone: Name of the backbone.
            config_yaml: The resolved configuration.
            resume: Whether to continue the record of an earlier run (then call `truncate_after`). Otherwise the folder
                of an earlier run is renamed to `{folder}.1`, `.2`, and so on.
            loggers: Destinations of metrics in addition to `metrics.jsonl` (`trainer_common.logger`).
            project: Name that groups experiments in trackers (`project_name`).
            config_dir: Folder of the YAML file, to which relative paths of the configuration may refer.

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

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self._folder

    def expect_steps(self, total: int) -> None:
        """Give the loggers the run's number of training steps."""
        for each in self._loggers:
            each.expect_steps(total)

    def check_in_place(self) -> None:
        """Check that the record is still there, before something else is written to its folder.

        Raises:
            RecordError: If it was deleted, moved, replaced or shortened.
        """
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
        rows = read_metrics(self._folder)
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
        """Record a finding of a check.

        Raises:
            RecordError: If it cannot be written.
        """
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
            step: The training step; 0 is before the first update.
            split: `train` or `val`.
            episode: The finished episode.
            advantage: The advantage of the whole episode.
            tokens: Token counts; without them the index has no number of distinct tokens.
            updates: The training of each sample; empty if unknown or untrained.

        Raises:
            RecordError: If the episode cannot be written.
        """
        return self._episodes.write(episode, EpisodeLabels(step, split, advantage, tokens), updates)

    def begin_step(self, step: int, episodes: Sequence[tuple[Episode, TokenCounts]]) -> None:
        """Write a training step's episodes before its update, so that no failure in the update loses them.

        Args:
            step: The training step.
            episodes: Its finished episodes, with their token counts.

        Raises:
            RecordError: If an episode cannot be written.
        """
        self._episodes.begin_step(step, episodes)

    def end_step(self, advantages: Mapping[str, float], updates: Mapping[str, Sequence[SampleUpdate]]) -> None:
        """Add the update's results to the episodes of `begin_step`.

        Args:
            advantages: The advantages by episode id, without episodes that were not trained.
            updates: The training of each sample, by episode id.

        Raises:
            RecordError: If an episode cannot be written.
        """
        self._episodes.end_step(advantages, updates)

    def write_summary(self, summary: RunSummary) -> Path:
        """Write `summary.json` and return its path.

        Raises:
            RecordError: If it cannot be written.
        """
        return write_summary(self._folder, summary)

    def close(self) -> None:
        """Close files, trackers and log, and release the folder. Later calls do nothing."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
