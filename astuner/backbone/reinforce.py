"""The reinforcement-learning loop, the same on every backbone: roll out, update, sync, validate, save."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence

from loguru import logger

from astuner.backbone.interrupt import interrupt_deferred
from astuner.backbone.loop import TrainingLoop
from astuner.backbone.session import refuse_all_failed
from astuner.backbone.step_credit import UpdateResult
from astuner.errors import NoSignalError
from astuner.schema import Episode
from astuner.task_rollout.statistics import batch_metrics, tokens_of

_NOTHING_DONE = UpdateResult({}, (), signal=False)


# In a row, after which a run that went well before is stopped too.
_MOST_FAILED_STEPS = 3


class ReinforcementLoop(TrainingLoop):
    """Rolls out episodes of the training tasks and learns from their rewards; the algorithm has a rule."""

    _failed_steps = 0

    @abstractmethod
    def learn(self, usable: Sequence[Episode], number: int) -> UpdateResult:
        """Update the weights by episodes that have a reward and samples, and hand them to the engine.

        Raises:
            BackboneError: the engine's logprobs do not belong to the model's weights, or the gradient is not finite.
        """

    def wait_for_learning(self, number: int) -> None:
        """Wait until step `number` is learned from, where another process does that by itself; a signal ends the wait.

        Args:
            number: the step's; it may have no usable episode.
        """

    def train(self) -> None:
        """Do the steps that are left, and the validations around them."""
        state = self.state
        if self.config.trainer_common.val_before_train and state.step == 0:
            self.session.validate("validation before")
            state.before = state.latest
        super().train()
        if state.validated != state.step:
            self.session.validate("validation after")
        state.after = state.latest

    def validate(self) -> None:
        """Measure the policy between steps."""
        self.session.validate(f"validation, step {self.state.step}")

    def step(self) -> str:
        """Do one training step; return a note for the progress bar."""
        session, state = self.session, self.state
        began = time.time()
        number = state.step + 1
        tasks = self.order.batch(number)
        episodes = session.run_batch(tasks, self.config.rollout.num_repeat, "train", f"step {number}: episodes")
        rolled = time.time()
        usable = [episode for episode in episodes if episode.status == "ok"]
        self._failed_steps = 0 if usable else self._failed_steps + 1
        if not usable and (state.totals.ok == 0 or self._failed_steps == _MOST_FAILED_STEPS):
            self._record(number, episodes, usable, _NOTHING_DONE)
            self.save()
            refuse_all_failed(episodes)
        self.wait_for_learning(number)
        # Weights, counters and record change together, so that a checkpoint finds them in agreement.
        with interrupt_deferred():
            result = self.learn(usable, number) if usable else _NOTHING_DONE
            state.step = number
            state.totals.add(episodes)
            metrics = batch_metrics(episodes) | result.metrics
            metrics |= {"time/rollout": rolled - began, "time/update": time.time() - rolled}
            self._record(number, episodes, usable, result)
            metrics["time/step"] = time.time() - began
            session.context.record.log_metrics(number, metrics)
        self._watch_signal(result.signal, any_usable=bool(usable))
        return f"reward {metrics['reward/mean']:.2f}, success {metrics['success/rate']:.0%}"

    def _record(self, step: int, episodes: list[Episode], usable: list[Episode], result: UpdateResult) -> None:
        names = [episode.episode_id for episode in usable]
        advantages = dict(zip(names, result.advantages, strict=False))
        updates = dict(zip(names, result.samples, strict=False))
        for episode in episodes:
            name = episode.episode_id
            self.session.context.record.write_episode(
                step, "train", episode, advantages.get(name), tokens_of([episode]), updates.get(name, ())
            )

    def _watch_signal(self, signal: bool, *, any_usable: bool) -> None:
        """Say aloud, or stop, when nothing can be learned.

        Raises:
            NoSignalError: `stop_on_no_signal` is set.
        """
        state, common = self.state, self.config.trainer_common
        state.steps_without_signal = 0 if signal else state.steps_without_signal + 1
        if signal:
            return
        steps = state.steps_without_signal
        if steps < common.no_signal_patience:
            why = "the rewards of no task's episodes differed" if any_usable else "no episode can be learned from"
            logger.warning("step {}: {}, so there was nothing to learn", state.step, why)
            return
        reason = (
            f"{steps} steps in a row had no rewards that differ, so nothing can be learned: every task is always "
            "solved or never, or its episodes fail. Use tasks of another difficulty, more rollout.num_repeat, a higher "
            "rollout.temperature, or a reward with more than two values"
        )
        if common.stop_on_no_signal:
            raise NoSignalError(f"{reason} (trainer_common.stop_on_no_signal)")
        logger.warning("{}", reason)
