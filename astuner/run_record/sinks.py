"""Where metrics go beside `metrics.jsonl`: the console, TensorBoard and three experiment trackers."""

from __future__ import annotations

import importlib.util
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from loguru import logger

from astuner.errors import ConfigError
from astuner.run_record.files import storing
from astuner.run_record.step_line import step_line

LoggerName = Literal["console", "tensorboard", "wandb", "swanlab", "trackio"]

_TRACKERS = ("wandb", "swanlab", "trackio")
_CONSOLE_METRICS = (
    "reward/mean", "success/rate", "val/reward", "val/success_rate", "val/loss", "loss/policy", "loss/kl", "loss/sft",
    "entropy", "grad_norm", "lr", "time/step",
)  # fmt: skip
_ALWAYS_SHOWN = ("reward/", "val/", "episodes/")
_SECONDS_BETWEEN_LINES = 10.0


@dataclass(frozen=True, slots=True)
class RunName:
    """How a run is called in experiment trackers.

    Attributes:
        project: groups experiments.
        experiment: groups the starts of one experiment.
        folder: the run's folder, where trackers put their files.
    """

    project: str
    experiment: str
    folder: Path

    @property
    def start(self) -> str:
        """A name for this start alone: trackers cannot take back the steps that a kill left behind."""
        return f"{self.experiment}-{time.strftime('%Y%m%d-%H%M%S')}"


class MetricSink(Protocol):
    """Takes finite metrics, step by step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step.

        Raises:
            RecordError: a file of the run record cannot be written.
        """
        ...

    def truncate_after(self, step: int) -> None:
        """Forget what this run's folder shows of steps later than `step`."""
        ...

    def close(self) -> None:
        """Write what is pending and end."""
        ...


class ConsoleSink:
    """A line of numbers a step, and one on its episodes, through loguru.

    Of quick steps that have neither episodes nor validation, one is shown in a while.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = -math.inf

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics that a person watches."""
        shown = [f"{name} {metrics[name]:.4g}" for name in _CONSOLE_METRICS if name in metrics]
        if not shown:
            return
        now = self._clock()
        if not any(name.startswith(_ALWAYS_SHOWN) for name in metrics) and now - self._last < _SECONDS_BETWEEN_LINES:
            return
        self._last = now
        logger.info("step {} · {}", step, " · ".join(shown))
        episodes = step_line(step, metrics)
        if episodes is not None:
            logger.info("{}", episodes)

    def truncate_after(self, step: int) -> None:
        """Do nothing: a console cannot forget."""

    def close(self) -> None:
        """Do nothing."""


class TensorboardSink:
    """Event files under `tensorboard/`, written in this thread by TensorBoard's own record writer.

    (Its `EventFileWriter` loads TensorFlow where installed, and reports a full disk as a traceback of a thread.)
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "tensorboard"
        self._writer: Any = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one event with all metrics; `RecordError` where that fails."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(step=step, summary=Summary(value=values))

    def truncate_after(self, step: int) -> None:
        """Tell readers to leave out what earlier event files have of later steps; `RecordError` where that fails."""
        from tensorboard.compat.proto.event_pb2 import SessionLog  # type: ignore[import-untyped]

        # A restart at a step is how TensorBoard itself marks everything from that step on as void.
        self._write(step=step + 1, session_log=SessionLog(status=SessionLog.START))

    def close(self) -> None:
        """Close the event file."""
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                writer.close()
            # What it still held was reported when it could not be written.
            except OSError as error:
                logger.debug("closing the TensorBoard file: {}", error)

    def _write(self, **content: Any) -> None:
        # tensorboard takes 0.4 s to load, which is not spent before the first step has something to log.
        from tensorboard.compat.proto.event_pb2 import Event

        # What does not fit on a full disk stays in the file's buffer, so that the next event finds the file whole.
        with storing(self._folder):
            if self._writer is None:
                self._writer = self._open_file()
                self._put(Event(wall_time=time.time(), file_version="brain.Event:2"))
            self._put(Event(wall_time=time.time(), **content))

    def _open_file(self) -> Any:
        from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

        self._folder.mkdir(parents=True, exist_ok=True)
        # Readers take the files in the order of their names.
        name = f"events.out.tfevents.{time.time_ns() / 1e9:.6f}.{socket.gethostname()}.{os.getpid()}"
        return RecordWriter((self._folder / name).open("xb"))

    def _put(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())
        self._writer.flush()


class TrackerSink:
    """wandb, swanlab or trackio; each start of an experiment is a run of its own there.

    A tracker that fails later than its start is warned of once: the run goes on, and `metrics.jsonl` has everything.
    """

    def __init__(self, name: str, start: Callable[[], Any]) -> None:
        """Start the tracker.

        Raises:
            ConfigError: it does not start.
        """
        self._name = name
        self._warned = False
        try:
            self._run = start()
        # Trackers raise errors of their own kinds: no network, no login, a refused project.
        except Exception as error:
            raise ConfigError(
                f"trainer_common.logger names {name}, which did not start: {error}; run `{name} login` or follow its "
                f"documentation, or take {name} out of trainer_common.logger"
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand the metrics on."""
        self._guarded(lambda: self._run.log(dict(metrics), step=step))

    def truncate_after(self, step: int) -> None:
        """Do nothing: this start has logged nothing yet."""

    def close(self) -> None:
        """Send what is pending and end the tracker's run."""
        self._guarded(self._run.finish)

    def _guarded(self, action: Callable[[], object]) -> None:
        try:
            action()
        # Losing a step in a tracker is better than losing the training.
        except Exception as error:
            if not self._warned:
                self._warned = True
                logger.warning("{} failed: {!r}; metrics.jsonl has everything (this is said once)", self._name, error)


def check_loggers(names: Sequence[LoggerName]) -> None:
    """Check, without importing any, that the named trackers are installed.

    Raises:
        ConfigError: one is not; gives the command that installs it.
    """
    missing = [name for name in names if name in _TRACKERS and not _is_installed(name)]
    if missing:
        raise ConfigError(
            f"trainer_common.logger names {', '.join(missing)}, which is not installed; "
            f"run `pip install {' '.join(missing)}`, or take it out of trainer_common.logger"
        )


def _is_installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    # A mere folder of that name, as wandb leaves in the working directory, has no origin.
    return spec is not None and spec.origin is not None


def open_sinks(names: Sequence[LoggerName], run: RunName) -> Iterator[MetricSink]:
    """Open the named sinks, one by one, so that those before one that fails can be closed.

    Raises:
        ConfigError: a tracker does not start.
    """
    make: Mapping[str, Callable[[], MetricSink]] = {
        "console": ConsoleSink,
        "tensorboard": lambda: TensorboardSink(run.folder),
        "wandb": lambda: TrackerSink("wandb", lambda: _start_wandb(run)),
        "swanlab": lambda: TrackerSink("swanlab", lambda: _start_swanlab(run)),
        "trackio": lambda: TrackerSink("trackio", lambda: _start_trackio(run)),
    }
    for name in dict.fromkeys(names):
        yield make[name]()


def _start_wandb(run: RunName) -> Any:
    import wandb

    # No console, code, diff or command line: what wandb collects by itself has not passed our redaction.
    settings = wandb.Settings(console="off", disable_code=True, disable_git=True, x_disable_meta=True)
    return wandb.init(project=run.project, group=run.experiment, name=run.start, dir=str(run.folder), settings=settings)


def _start_swanlab(run: RunName) -> Any:
    import swanlab

    return swanlab.init(project=run.project, experiment_name=run.start, logdir=str(run.folder / "swanlog"))


def _start_trackio(run: RunName) -> Any:
    import trackio

    return trackio.init(project=run.project, name=run.start, embed=False)
