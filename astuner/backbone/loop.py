"""What all training loops have in common, on every backbone: order of tasks, validations, checkpoints, going on."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from loguru import logger

from astuner.backbone.algorithms import Algorithm
from astuner.backbone.interrupt import interrupt_deferred
from astuner.backbone.progress_state import RunState
from astuner.backbone.session import Session
from astuner.backbone.task_order import TaskOrder
from astuner.config.root import AstunerConfig


@dataclass
class TrainingLoop(ABC):
    """Trains a session's model on its training tasks.

    Attributes:
        session: engine, state.
        algorithm: resolved.
    """

    session: Session
    algorithm: Algorithm
    _saved: tuple[int, int | None] | None = field(default=None, init=False)

    @abstractmethod
    def step(self) -> str:
        """Do the next training step; return a note for the progress bar."""

    @abstractmethod
    def validate(self) -> None:
        """Measure the policy between steps."""

    @abstractmethod
    def write_checkpoint(self, progress: dict[str, Any]) -> None:
        """Save the model as it is after `state.step` steps, with `progress`, which is of plain types.

        Raises:
            RecordError: it cannot be written.
        """

    @abstractmethod
    def read_checkpoint(self) -> dict[str, Any] | None:
        """Restore the newest checkpoint and return its progress, or None where there is none.

        Raises:
            RecordError: it cannot be read.
        """

    def watching(self) -> contextlib.AbstractContextManager[object]:
        """Return what is entered around each step."""
        return contextlib.nullcontext()

    @property
    def config(self) -> AstunerConfig:
        """Section `astuner`."""
        return self.session.config

    @property
    def state(self) -> RunState:
        """The run's counters."""
        return self.session.state

    @cached_property
    def order(self) -> TaskOrder:
        """Which tasks each step takes."""
        seed = self.config.trainer_common.seed if self.config.data.shuffle else None
        return TaskOrder(self.session.ingredients.tasks.training, self.config.data.train_batch_size, seed)

    @cached_property
    def total_steps(self) -> int:
        """Number of training steps of the run."""
        common = self.config.trainer_common
        return self.order.total_steps(common.total_epochs, common.total_training_steps)

    def run(self) -> None:
        """Go on from the newest checkpoint, if there is one, and do the steps that are left.

        Raises:
            BackboneError: the numbers are not finite.
            NoSignalError: the run has come to an end of no use.
            KeyboardInterrupt: after the state has been saved.
        """
        self._restore()
        try:
            self.train()
        except KeyboardInterrupt:
            with interrupt_deferred():
                logger.warning("interrupted: {}", self.what_is_kept())
                self.save()
            raise

    def train(self) -> None:
        """Do the steps that are left, with validations and checkpoints between them."""
        common, state = self.config.trainer_common, self.state
        if state.step < self.total_steps:
            logger.info("training: {} steps, {} of them done", self.total_steps, state.step)
        with self.session.context.progress.phase("training", self.total_steps, done=state.step) as phase:
            self._validate_if_due()  # a run that was interrupted in a validation still owes it
            while state.step < self.total_steps:
                with self.watching():
                    note = self.step()
                phase.advance(note)
                self._validate_if_due()
                if state.step % common.save_freq == 0 or state.step == self.total_steps:
                    self.save()

    def save(self) -> None:
        """Write a checkpoint of the steps done, unless this very state is in one; a second Ctrl-C has to wait."""
        state, session = self.state, self.session
        now = (state.step, state.validated)
        if state.step == 0 or self._saved == now:
            return
        with interrupt_deferred(), session.context.phase("save_checkpoint"):
            self.write_checkpoint(state.dump(session.context.started))
            self._saved = now

    def what_is_kept(self) -> str:
        """Say what an interrupted run can go on from."""
        if self.state.step == 0:
            return "no step was done, so there is nothing to go on from"
        return f"saving step {self.state.step}, from which the same command goes on"

    def _validate_if_due(self) -> None:
        state = self.state
        due = 0 < state.step < self.total_steps and state.step % self.config.trainer_common.test_freq == 0
        if due and state.validated != state.step:
            self.validate()

    def _restore(self) -> None:
        with self.session.context.phase("load_model"):
            progress = self.read_checkpoint()
        if progress is not None:
            self.session.state = RunState.load(progress)
            self.session.context.record.truncate_after(self.state.step)
            self._saved = (self.state.step, self.state.validated)
            logger.info("going on from the checkpoint of step {}", self.state.step)
