"""Writes the record of training steps in a thread, so that the training loop does not wait for it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from astuner.run_record.record import RunRecord
from astuner.run_record.updates import SampleUpdate
from astuner.schema import Episode, TokenCounts

# Jobs that wait: more than those of one step. A loop that is faster than the disk waits for it.
_MAX_JOBS = 4


@dataclass(frozen=True)
class FinishedStep:
    """The results of a training step.

    Attributes:
        step: The training step.
        metrics: Its metrics.
        advantages: The advantages by episode id, without episodes that were not trained.
        updates: The training of each sample, by episode id.
    """

    step: int
    metrics: Mapping[str, float]
    advantages: Mapping[str, float]
    updates: Mapping[str, Sequence[SampleUpdate]]


class StepWriter:
    """Writes the episodes and metrics of training steps to a record, in order, in its own thread.

    The metrics of a step are written after its episodes, and the step is done when they are written. A kill therefore
    loses no episode of a step that is done. Call `flush` before a checkpoint is written, because a resumed run
    continues after it.
    """

    def __init__(self, record: RunRecord) -> None:
        self._waited = 0.0
        self._record = record
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(_MAX_JOBS)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._write, name="run-record", daemon=True)
        self._thread.start()

    def begin_step(self, step: int, episodes: Sequence[tuple[Episode, TokenCounts]]) -> None:
        """Write the episodes of a step, whose update has not begun; see `RunRecord.begin_step`.

        Raises:
            RecordError: If an earlier job failed.
        """
        self.flush()  # so that no more than the episodes of one step are in memory
        self._put(lambda: self._record.begin_step(step, episodes))

    def end_step(self, finished: FinishedStep) -> None:
        """Add the update's results to the episodes of `begin_step`, and write the step's metrics.

        Raises:
            RecordError: If an earlier job failed.
        """

        def write() -> None:
            self._record.end_step(finished.advantages, finished.updates)
            self._record.log_metrics(finished.step, finished.metrics)

        self._put(write)

    def when_written(self, action: Callable[[], None]) -> None:
        """Call `action` in the thread of the writer as soon as all earlier steps are written.

        Raises:
            RecordError: If an earlier job failed.
        """
        self._put(action)

    def seconds_waited(self) -> float:
        """Return the seconds for which the caller has waited for the record since the last call."""
        waited, self._waited = self._waited, 0.0
        return waited

    def flush(self) -> None:
        """Wait until all jobs are done.

        Raises:
            RecordError: If one failed.
        """
        started = time.perf_counter()
        self._jobs.join()
        self._waited += time.perf_counter() - started
        self._raise_error()

    def _put(self, job: Callable[[], None]) -> None:
        self._raise_error()
        started = time.perf_counter()
        self._jobs.put(job)
        self._waited += time.perf_counter() - started

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
