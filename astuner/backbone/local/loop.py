"""What the reinforcement-learning and the supervised loop have in common: order of tasks, optimiser, checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property

from loguru import logger

from astuner.backbone.algorithms import Algorithm
from astuner.backbone.interrupt import interrupt_deferred
from astuner.backbone.local.checkpoint import Checkpoints
from astuner.backbone.local.optimiser import Optimiser
from astuner.backbone.local.session import Session
from astuner.backbone.local.threads import SpareCores
from astuner.backbone.progress_state import RunState
from astuner.backbone.task_order import TaskOrder
from astuner.config.root import AstunerConfig


@dataclass
class TrainingLoop(ABC):
    """Trains a session's policy on its training tasks.

    Attributes:
        session: policy, engine, state.
        algorithm: resolved.
        checkpoints: where progress is saved.
    """

    session: Session
    algorithm: Algorithm
    checkpoints: Checkpoints
    _saved: tuple[int, int | None] | None = field(default=None, init=False)

    @abstractmethod
    def step(self) -> str:
        """Do the next training step; return a note for the progress bar."""

    @abstractmethod
    def validate(self) -> None:
        """Measure the policy between steps."""

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

    @cached_property
    def optimiser(self) -> Optimiser:
        """Moves the policy."""
        return Optimiser(self.session.policy.trainable(), self.config.trainer_common.optim, self.total_steps)

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
                logger.warning("interrupted: {}", self._what_is_kept())
                self.save()
            raise

    def train(self) -> None:
        """Do the steps that are left, with validations and checkpoints between them."""
        common, state = self.config.trainer_common, self.state
        if state.step < self.total_steps:
            logger.info("training: {} steps, {} of them done", self.total_steps, state.step)
        cores = SpareCores()
        with self.session.context.progress.phase("training", self.total_steps, done=state.step) as phase:
            self._validate_if_due()  # a run that was interrupted in a validation still owes it
            while state.step < self.total_steps:
                with cores.watching():
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
        with interrupt_deferred():
            progress = state.dump(session.context.started)
            codec = session.ingredients.codec
            self.checkpoints.save(state.step, session.policy, self.optimiser, codec, progress)
            self._saved = now

    def _what_is_kept(self) -> str:
        if self.state.step == 0:
            return "no step was done, so there is nothing to go on from"
        return f"saving step {self.state.step}, from which the same command goes on"

    def _validate_if_due(self) -> None:
        state = self.state
        due = 0 < state.step < self.total_steps and state.step % self.config.trainer_common.test_freq == 0
        if due and state.validated != state.step:
            self.validate()

    def _restore(self) -> None:
        progress = self.checkpoints.load(self.session.policy, self.optimiser)
        if progress is not None:
            self.session.state = RunState.load(progress)
            self.session.context.record.truncate_after(self.state.step)
            self._saved = (self.state.step, self.state.validated)
            logger.info("going on from the checkpoint of step {}", self.state.step)
