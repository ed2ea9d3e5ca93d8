"""The record of one run: everything under `launcher_record/{experiment}/` that the run itself leaves.

environment.json    revision, versions, machine, command line
config.yaml         the resolved configuration
run.log             the log
services/           what the run's services printed (see `astuner.processes.log`)
metrics.jsonl       metrics, one line a call of `log_metrics`
tensorboard/        the same for TensorBoard
episodes/           one file an episode, and index.jsonl
plots/              reward.png, loss.png (see `plot_run`)
summary.json        how it ended
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from loguru import logger

from astuner.run_record.environment import describe_environment
from astuner.run_record.episode_file import EpisodeLabels, Split
from astuner.run_record.episodes import EpisodeStore
from astuner.run_record.folder import prepare_folder, write_config, write_environment
from astuner.run_record.lock import FolderLock
from astuner.run_record.log_file import LogFile
from astuner.run_record.metrics import MetricsFile
from astuner.run_record.sinks import LoggerName, MetricSink, RunName, check_loggers, open_sinks
from astuner.run_record.summary import RunSummary, write_summary
from astuner.run_record.updates import SampleUpdate
from astuner.schema import Episode, TokenCounts

DEFAULT_LOGGERS: tuple[LoggerName, ...] = ("console", "tensorboard")


class RunRecord:
    """Writes the record of one run. No secret of the environment reaches it.

    `log_metrics` and `write_episode` may be called from several threads at once.
    """

    def __init__(
        self, folder: Path, metrics: MetricsFile, sinks: Sequence[MetricSink], episodes: EpisodeStore, stack: ExitStack
    ) -> None:
        self._folder = folder
        self._metrics = metrics
        self._metrics_lock = threading.Lock()
        self._sinks = sinks
        self._episodes = episodes
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
    ) -> Self:
        """Open the record of a run that starts now.

        Args:
            folder: the run's folder; its name is the experiment's.
            backbone: the backbone that runs.
            config_yaml: the resolved configuration.
            resume: go on in the folder of an earlier run (then call `truncate_after`); otherwise an earlier run is
                moved aside to `{folder}.1`, `.2`, ….
            loggers: where metrics go beside `metrics.jsonl` (`trainer_common.logger`).
            project: groups experiments in trackers (`project_name`).

        Raises:
            ConfigError: a named tracker is not installed or does not start.
            RecordError: a live run writes there, the folder holds something else, or it cannot be written.
        """
        check_loggers(loggers)
        folder = folder.absolute()
        with ExitStack() as stack:
            lock = FolderLock(folder)
            stack.callback(lock.release)
            aside = prepare_folder(folder, resume=resume)
            # First of all files: a folder with others and without it is taken for somebody else's.
            write_environment(folder, describe_environment(backbone))
            log = LogFile(folder)
            stack.callback(log.close)
            write_config(folder, config_yaml)
            if aside is not None:
                logger.info("moved the earlier run of {} to {}", folder.name, aside)
            metrics = MetricsFile(folder)
            stack.callback(metrics.close)
            episodes = EpisodeStore(folder)
            stack.callback(episodes.close)
            sinks = []
            for sink in open_sinks(loggers, RunName(project, folder.name, folder)):
                stack.callback(sink.close)
                sinks.append(sink)
            return cls(folder, metrics, sinks, episodes, stack.pop_all())

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self._folder

    def truncate_after(self, step: int) -> None:
        """Forget the metrics and episodes of steps later than `step`, which the resumed run does again.

        Raises:
            RecordError: they cannot be removed.
        """
        lines = self._metrics.truncate_after(step)
        episodes = self._episodes.truncate_after(step)
        for sink in self._sinks:
            sink.truncate_after(step)
        if lines or episodes:
            logger.info("resumed after step {}: removed {} metrics lines and {} episodes", step, lines, episodes)

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step; a step may be logged in several parts.

        NaN and infinite values are recorded as null and warned of, once a name.

        Raises:
            RecordError: they cannot be written.
        """
        with self._metrics_lock:
            finite = self._metrics.log(step, metrics)
            for sink in self._sinks:
                sink.log(step, finite)

    def write_episode(
        self,
        step: int,
        split: Split,
        episode: Episode,
        advantage: float | None = None,
        tokens: TokenCounts | None = None,
        updates: Sequence[SampleUpdate] = (),
    ) -> Path:
        """Record an episode in a file of its own and in the index; return the file.

        A trainer writes an episode once, after the update that it took part in.

        Args:
            step: the training step; 0 is before the first update.
            split: `train` or `val`.
            episode: the episode, finished.
            advantage: what the trainer gave it as a whole.
            tokens: its tokens; without them `distinct` is unknown in the index.
            updates: how each of its samples was trained; empty where it was not, or that is not known.

        Raises:
            RecordError: it cannot be written.
        """
        return self._episodes.write(episode, EpisodeLabels(step, split, advantage, tokens), updates)

    def write_summary(self, summary: RunSummary) -> Path:
        """Write `summary.json` and return its path.

        Raises:
            RecordError: it cannot be written.
        """
        return write_summary(self._folder, summary)

    def close(self) -> None:
        """End the record: close its files, trackers and log, and free the folder. May be called again."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
