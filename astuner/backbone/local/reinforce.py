"""The reinforcement-learning loop: roll out, update, sync, validate, save."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property

from loguru import logger

from astuner.backbone.ingredients import Ingredients
from astuner.backbone.local.algorithms import Algorithm
from astuner.backbone.local.checkpoint import Checkpoints
from astuner.backbone.local.interrupt import interrupt_deferred
from astuner.backbone.local.optimiser import Optimiser
from astuner.backbone.local.progress_state import RunState, validation_entry
from astuner.backbone.local.session import Session, refuse_all_failed
from astuner.backbone.local.update import PolicyUpdate, UpdateResult
from astuner.backbone.task_order import TaskOrder
from astuner.errors import NoSignalError
from astuner.schema import Episode
from astuner.task_rollout.statistics import batch_metrics, tokens_of


@dataclass
class ReinforcementLoop:
    """Trains a session's policy on its training tasks.

    Attributes:
        session: policy, engine, state.
        algorithm: resolved; it has a rule.
        checkpoints: where progress is saved.
    """

    session: Session
    algorithm: Algorithm
    checkpoints: Checkpoints

    @property
    def state(self) -> RunState:
        """The run's counters."""
        return self.session.state

    @property
    def _ingredients(self) -> Ingredients:
        return self.session.ingredients

    @cached_property
    def _order(self) -> TaskOrder:
        config = self.session.config
        seed = config.trainer_common.seed if config.data.shuffle else None
        return TaskOrder(self._ingredients.tasks.training, config.data.train_batch_size, seed)

    @cached_property
    def _total_steps(self) -> int:
        common = self.session.config.trainer_common
        return self._order.total_steps(common.total_epochs, common.total_training_steps)

    @cached_property
    def _optimiser(self) -> Optimiser:
        optim = self.session.config.trainer_common.optim
        return Optimiser(self.session.policy.trainable(), optim, self._total_steps)

    @cached_property
    def _update(self) -> PolicyUpdate:
        return PolicyUpdate(self.session.config, self.algorithm, self.session.policy, self._optimiser)

    def restore(self) -> bool:
        """Go on from the newest checkpoint, if there is one."""
        progress = self.checkpoints.load(self.session.policy, self._optimiser)
        if progress is None:
            return False
        self.session.state = RunState.load(progress)
        self.session.context.record.truncate_after(self.session.state.step)
        logger.info("going on from the checkpoint of step {}", self.session.state.step)
        return True

    def run(self) -> None:
        """Do the steps that are left, and the validations around them.

        Raises:
            BackboneError: nothing can be learned, or the numbers are not finite.
            KeyboardInterrupt: after the state has been saved.
        """
        session, common = self.session, self.session.config.trainer_common
        state = session.state
        if common.val_before_train and state.step == 0 and state.before is None:
            result = session.validate("validation before")
            state.before = validation_entry(result) if result else None
        try:
            with session.context.progress.phase("training", self._total_steps, done=state.step) as phase:
                while state.step < self._total_steps:
                    phase.advance(self._step())
                    if state.step < self._total_steps:
                        self._between_steps()
        except KeyboardInterrupt:
            self.save()
            raise
        if state.after is None:
            result = session.validate("validation after")
            state.after = validation_entry(result) if result else None

    def save(self) -> None:
        """Write a checkpoint of the steps done."""
        if self.session.state.step == 0:
            return
        progress = self.session.state.dump(self.session.context.started)
        self.checkpoints.save(
            self.session.state.step, self.session.policy, self._optimiser, self._ingredients.tokenizer, progress
        )

    def _between_steps(self) -> None:
        common, state = self.session.config.trainer_common, self.session.state
        if state.step % common.test_freq == 0:
            self.session.validate(f"validation, step {state.step}")
        if state.step % common.save_freq == 0:
            self.save()

    def _step(self) -> str:
        """Do one training step; return a note for the progress bar."""
        session, state = self.session, self.session.state
        began = time.time()
        number = state.step + 1
        tasks = self._order.batch(number)
        repeats = session.config.rollout.num_repeat
        episodes = session.run_batch(tasks, repeats, "train", f"step {number}: episodes")
        rolled = time.time()
        usable = [episode for episode in episodes if episode.status == "ok"]
        if state.totals.ok == 0:
            refuse_all_failed(episodes)
        # What a checkpoint must hold together changes together.
        with interrupt_deferred():
            result = self._learn(usable, number)
            state.step = number
            state.totals.add(episodes)
        metrics = batch_metrics(episodes) | result.metrics
        metrics |= {"time/rollout": rolled - began, "time/update": time.time() - rolled}
        self._record(number, episodes, usable, result)
        metrics["time/step"] = time.time() - began
        session.context.record.log_metrics(number, metrics)
        self._watch_signal(result.moved)
        return f"reward {metrics['reward/mean']:.2f}, success {metrics['success/rate']:.0%}"

    def _learn(self, usable: list[Episode], number: int) -> UpdateResult:
        """Update the weights and hand them to the engine."""
        if not usable:
            return UpdateResult({}, (), moved=False)
        session = self.session
        session.policy.model.train()
        result = self._update.step(usable, number)
        session.policy.model.eval()
        session.engine.update_weights(session.policy.full_weights(), number)
        return result

    def _record(self, step: int, episodes: list[Episode], usable: list[Episode], result: UpdateResult) -> None:
        advantages = {episode.episode_id: value for episode, value in zip(usable, result.advantages, strict=False)}
        for episode in episodes:
            self.session.context.record.write_episode(
                step, "train", episode, advantages.get(episode.episode_id), tokens_of([episode])
            )

    def _watch_signal(self, moved: bool) -> None:
        """Say aloud, or stop, when nothing can be learned.

        Raises:
            NoSignalError: `stop_on_no_signal` is set.
        """
        state, common = self.session.state, self.session.config.trainer_common
        state.steps_without_signal = 0 if moved else state.steps_without_signal + 1
        if moved:
            return
        steps = state.steps_without_signal
        if steps < common.no_signal_patience:
            logger.warning("step {}: no group had reward variance, so the weights stayed as they were", state.step)
            return
        reason = (
            f"{steps} steps in a row gave no group with reward variance, so nothing can be learned: every task is "
            "always solved or never. Use tasks of another difficulty, more rollout.num_repeat, a higher "
            "rollout.temperature, or a reward with more than two values"
        )
        if common.stop_on_no_signal:
            raise NoSignalError(f"{reason} (trainer_common.stop_on_no_signal)")
        logger.warning("{}", reason)
