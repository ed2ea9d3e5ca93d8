"""Loggers that repeat the metrics of `metrics.jsonl`: TensorBoard and experiment trackers, beside the console."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from loguru import logger

from astuner.errors import ConfigError
from astuner.run_record.console_lines import ConsoleLogger
from astuner.run_record.files import write_errors
from astuner.run_record.metrics import MetricLogger, MetricsRow
from astuner.system.paths import is_installed

LoggerName = Literal["console", "tensorboard", "wandb", "swanlab", "trackio"]

_EVENTS = "events.out.tfevents."


@dataclass(frozen=True, slots=True)
class RunName:
    """Names of a run in experiment trackers, which group experiments by `project` and write files to `folder`."""

    project: str
    experiment: str
    folder: Path

    @property
    def start(self) -> str:
        """A unique name for this start, because trackers cannot remove steps that a killed run has logged."""
        return f"{self.experiment}-{time.strftime('%Y%m%d-%H%M%S')}"


class TensorboardLogger(MetricLogger):
    """Writes event files to `tensorboard/` in the calling thread, with TensorBoard's own record writer.

    (TensorBoard's `EventFileWriter` imports TensorFlow if installed, and reports a full disk as a traceback of a
    thread. accelerate's trackers import PyTorch and cannot truncate.)
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "tensorboard"
        self._writer: Any = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one event with all metrics; `RecordError` if that fails."""
        self._log(step, metrics, time.time())

    def _log(self, step: int, metrics: Mapping[str, float], wall_time: float) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(wall_time, step=step, summary=Summary(value=values))

    def restart(self, rows: Sequence[MetricsRow]) -> None:
        """Write the rows to a new event file, and remove the earlier ones; `RecordError` if that fails."""
        from tensorboard.compat.proto.event_pb2 import SessionLog  # type: ignore[import-untyped]

        earlier = list(self._folder.glob(f"{_EVENTS}*"))
        if not earlier and not rows:
            return
        # A running TensorBoard forgets what it has read from earlier files.
        self._write(step=0, session_log=SessionLog(status=SessionLog.START))
        for row in rows:
            self._log(row.step, {name: value for name, value in row.metrics.items() if value is not None}, row.time)
        for file in earlier:
            with write_errors(file):
                file.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the event file."""
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                writer.close()
            except OSError as error:  # The failure was reported when the buffered events could not be written.
                logger.debug("closing the TensorBoard file: {}", error)

    def _write(self, wall_time: float | None = None, **content: Any) -> None:
        # tensorboard takes 0.4 s to import, so it is imported when the first step is logged.
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

        # On a full disk, events remain in the file's buffer, so that the file stays valid for later events.
        with write_errors(self._folder):
            events = [Event(wall_time=time.time() if wall_time is None else wall_time, **content)]
            if self._writer is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                earlier = self._folder.iterdir()
                # Readers sort the files by the time in their names, and the clock may have been set back.
                times = (re.match(rf"{re.escape(_EVENTS)}([0-9]+(\.[0-9]+)?)\.", file.name) for file in earlier)
                created = max([time.time(), *(float(match[1]) + 1 for match in times if match)])
                name = f"{_EVENTS}{created:.6f}.{socket.gethostname()}.{os.getpid()}"
                self._writer = RecordWriter((self._folder / name).open("xb"))
                events.insert(0, Event(wall_time=time.time(), file_version="brain.Event:2"))
            for event in events:
                self._writer.write(event.SerializeToString())
                self._writer.flush()


class TrackerLogger(MetricLogger):
    """wandb, swanlab or trackio. Each start of an experiment is a separate run there, which has no steps yet.

    A failure after the start causes one warning: the training continues, and `metrics.jsonl` is complete.
    """

    def __init__(self, name: str, start: Callable[[], Any]) -> None:
        """Start the tracker; `ConfigError` if that fails."""
        self._name = name
        self._has_failed = False
        try:
            self._run = start()
        # Trackers raise many types: no network, no login, an unknown project.
        except Exception as error:
            raise ConfigError(
                f"trainer_common.logger names {name}, which did not start: {error}; run `{name} login`, follow its "
                f"documentation, or remove {name} from trainer_common.logger"
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics to the tracker."""
        self._warn_on_failure(lambda: self._run.log(dict(metrics), step=step))

    def close(self) -> None:
        """Send pending metrics and end the tracker's run."""
        self._warn_on_failure(self._run.finish)

    def _warn_on_failure(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:
            if not self._has_failed:
                self._has_failed = True
                logger.warning(
                    "{} failed: {!r}; metrics.jsonl is complete; further warnings are suppressed", self._name, error
                )


def check_loggers(names: Sequence[LoggerName]) -> None:
    """Check that the experiment trackers among `names` are installed, and that wandb has an API key.

    Raises:
        ConfigError: If one is not installed, or wandb has no key. The message has the command that corrects it.
    """
    missing = [name for name in names if name in ("wandb", "swanlab", "trackio") and not is_installed(name)]
    if missing:
        raise ConfigError(
            f"trainer_common.logger needs packages that are not installed: {', '.join(missing)}; "
            f"run `pip install {' '.join(missing)}`, or remove it from trainer_common.logger"
        )
    if "wandb" in names and not _wandb_can_start():
        raise ConfigError(
            "trainer_common.logger names wandb, which has no API key; run `wandb login`, set the environment variable "
            "WANDB_API_KEY, set WANDB_MODE=offline, or remove wandb from trainer_common.logger"
        )


def _wandb_can_start() -> bool:
    """Return whether wandb has an API key or needs none. On a terminal, wandb asks for a missing key."""
    import wandb

    if wandb.setup().settings.mode in ("offline", "disabled", "dryrun"):
        return True
    try:
        return bool(wandb.login(verify=False))
    except Exception:  # without a terminal, wandb raises an error whose type depends on its version
        return False


def open_loggers(names: Sequence[LoggerName], run: RunName) -> Iterator[MetricLogger]:
    """Open the loggers one by one, so that the caller can close the earlier ones if one raises `ConfigError`."""
    for name in dict.fromkeys(names):
        if name == "console":
            yield ConsoleLogger()
        elif name == "tensorboard":
            yield TensorboardLogger(run.folder)
        else:
            yield TrackerLogger(name, partial(_start_tracker, name, run))


def _start_tracker(name: LoggerName, run: RunName) -> Any:
    tracker: Any = import_module(name)
    if name == "swanlab":
        return tracker.init(project=run.project, experiment_name=run.start, logdir=str(run.folder / "swanlog"))
    if name == "trackio":
        return tracker.init(project=run.project, name=run.start, embed=False)
    # Console output, code, diff and command line are not uploaded to wandb, as they are not redacted.
    settings = tracker.Settings(console="off", disable_code=True, disable_git=True, x_disable_meta=True)
    folder = str(run.folder)
    return tracker.init(project=run.project, group=run.experiment, name=run.start, dir=folder, settings=settings)
