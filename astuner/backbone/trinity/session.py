"""The training session of the trinity backbone. Import it once the environment of Trinity and Ray is set."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from loguru import logger
from ray.exceptions import RayError

from astuner.algorithms.credit_assignment import UpdateResult
from astuner.backbone.base import RunContext
from astuner.backbone.training.schedule import TaskOrder
from astuner.backbone.training.session import TrainingSession, batch_request
from astuner.backbone.trinity.actors import TrinityActors
from astuner.backbone.trinity.checkpoint import TrinityCheckpoints, TrinityState
from astuner.backbone.trinity.coordinator import StepSchedule
from astuner.backbone.trinity.event_consumer import EventConsumer, TrainedStep, coordinator_lost
from astuner.backbone.trinity.metrics import check_current_weights, check_samples_match, update_metrics
from astuner.backbone.trinity.rules import TrinityRunFacts, sampler_dtype, steps_ahead
from astuner.backbone.trinity.training_backends import TrainingBackend
from astuner.errors import BackboneError
from astuner.schema import Episode
from astuner.system.signals import signals_deferred
from astuner.task_rollout.rollout import BatchRequest, OnEpisode


@dataclass(eq=False)
class TrinitySession(TrainingSession):
    """Trinity's explorer, which runs episodes, and its trainer. They run asynchronously in processes of Ray.

    A rollout waits for the explorer's next batch, and an update waits for the trainer.
    """

    context: RunContext
    actors: TrinityActors
    event_consumer: EventConsumer
    facts: TrinityRunFacts
    training_backend: TrainingBackend
    trinity_state: TrinityState
    checkpoints: TrinityCheckpoints
    _trained: TrainedStep | None = field(default=None, init=False)
    _order: TaskOrder = field(default_factory=lambda: TaskOrder((), 1, None), init=False)

    def __post_init__(self) -> None:
        self._config = self.context.config.astuner
        # Optimizer steps of Trinity's trainer in a training step.
        self._updates = self._config.trainer_common.mini_batch_num

    @property
    def _is_training(self) -> bool:
        return self.event_consumer.last_trainer_step > 0

    @property
    def steps_ahead(self) -> int:
        """How many training steps the explorer may start ahead of the trainer."""
        return steps_ahead(self._config)

    def use_order(self, order: TaskOrder) -> None:
        """Take the training tasks' order; the coordinator gets a copy."""
        self._order = order

    def record_success(self, step: int, success_rates: Mapping[str, float]) -> None:
        """Send the results of a step to the coordinator, whose next batches may depend on them."""
        _call(self.event_consumer.coordinator.record_success, step, success_rates)

    def roll_out(self, request: BatchRequest, on_episode: OnEpisode, on_attempt: OnEpisode) -> list[Episode]:
        """Wait for a training step's episodes, or have the explorer run those of a validation or a dry run.

        The first training step starts explorer and trainer.
        """
        if request.split == "val" or self.facts.mode == "bench":  # not trained on
            _call(self.event_consumer.coordinator.request_evaluation, request)
            self.actors.start_evaluation(self._config.deadlines.validation)
            return self.event_consumer.run(request, on_episode, on_attempt)
        if not self._is_training:
            with signals_deferred():
                self._start_training(request.step - 1)
        return self.event_consumer.run(request, on_episode, on_attempt)

    def _start_training(self, steps_done: int) -> None:
        config, inputs = self._config, self.context.run_inputs
        total_steps = self.facts.total_steps
        schedule = StepSchedule(
            order=self._order,
            request=batch_request(config, (), config.rollout.num_repeat, "train", 0),
            steps_done=steps_done,
            last_step=total_steps,
            max_steps_ahead=self.steps_ahead,
            max_staleness=config.asynchrony.max_staleness,
            pause_every=config.trainer_common.test_freq if inputs.tasks.validation else total_steps,
        )
        self.event_consumer.last_trainer_step = total_steps * self._updates
        self.event_consumer.trainer_step = steps_done * self._updates
        _call(self.event_consumer.coordinator.start_training, schedule)
        self.actors.start()

    def wait_for_update(self, step: int) -> None:
        """Wait until the trainer has finished `step`. The trainer does the optimizer steps even without any reward."""
        if self._trained is not None and self._trained.step == step:
            return  # a signal interrupted the caller after an earlier call
        last = step * self._updates
        with self.context.phase("update"):
            self.event_consumer.wait_for_update(step, last)
        with signals_deferred():
            trainer_steps = range(last - self._updates + 1, last + 1)
            self._trained = self.event_consumer.take_update(step, trainer_steps)

    def end_training(self, step: int) -> int:
        """Let explorer and trainer start nothing more. Return the last step, which the trainer finishes and saves.

        This is the step that the trainer has started, or the next step if its episodes are complete. The trainer is
        told at once, because the weights of a step are lost as soon as the next update starts.
        """
        if not self._is_training:
            return step
        is_sampled = step + 1 in self.event_consumer.pending
        last: int = _call(self.event_consumer.coordinator.end_training, step + is_sampled)
        self.event_consumer.last_trainer_step = last * self._updates
        return last

    def update(self, episodes: Sequence[Episode], step: int) -> UpdateResult:
        """Return the result of the update that `wait_for_update` waited for.

        Raises:
            BackboneError: the trainer received other samples, samples that are older than `max_staleness`, or samples
                of other weights than the current ones.
        """
        trained = self._trained
        assert trained is not None
        check_samples_match(episodes, trained.advantages.sample_keys, trained.digests, step)
        dtype = getattr(torch, sampler_dtype(self._config, self.facts))
        check_current_weights(trained.metrics, dtype, step)
        metrics = update_metrics(trained.metrics) | {"backlog/steps": self.event_consumer.backlog}
        staleness, max_staleness = metrics.get("staleness/max", 0.0), self._config.asynchrony.max_staleness
        if staleness > max_staleness:
            raise BackboneError(
                f"step {step} was sampled with weights that are {staleness:.0f} steps old, but astuner.asynchrony."
                f"max_staleness is {max_staleness}. This is a bug in the explorer's schedule; please report it"
            )
        result: UpdateResult | None = trained.advantages.result
        if result is None:
            return UpdateResult(metrics, (), signal=False)
        # The trainer may have lost the experiences of an episode, which was not trained then.
        index_of = {episode_id: index for index, episode_id in enumerate(trained.advantages.episode_ids)}
        indexes = [index_of.get(episode.episode_id) for episode in episodes]
        return replace(
            result,
            metrics={**result.metrics, **metrics},
            advantages=tuple(0.0 if index is None else result.advantages[index] for index in indexes),
            samples=tuple(() if index is None else result.samples[index] for index in indexes),
        )

    def sync(self, step: int) -> None:
        """Do nothing: explorer and trainer exchange weights between themselves."""

    @contextlib.contextmanager
    def validation(self, step: int) -> Iterator[None]:
        """Give the waiting explorer the weights after `step` steps, and let it continue after the block."""
        trainer_step, deadlines = step * self._updates, self._config.deadlines
        if self._is_training:
            with self.context.phase("sync_weights"):
                if trainer_step == self.event_consumer.last_trainer_step:
                    self.actors.wait_until_trained(deadlines.save_checkpoint)
                    self.actors.sync_weights(deadlines.sync_weights)
                elif self._config.asynchrony.sync_style == "trainer_driven":
                    self.actors.wait_for_pushed_weights(trainer_step, deadlines.sync_weights)
                else:
                    self.actors.pull_weights(deadlines.sync_weights)
        yield
        if self._is_training and step < self.facts.total_steps:
            _call(self.event_consumer.coordinator.resume_after, step)

    def save(self, step: int, progress: dict[str, Any]) -> bool:
        """Write a checkpoint with the weights that the trainer saved after `step`; return False if it saved none.

        The trainer saves every `save_freq` steps, after the last step, and after `end_training`. It cannot save in
        between, as it may have done further steps already.
        """
        weights = self._saved_weights(step)
        if weights is None:
            logger.warning(
                "step {} has no checkpoint: Trinity's trainer saves every trainer_common.save_freq = {} steps only",
                step,
                self._config.trainer_common.save_freq,
            )
            return False
        earlier = set(self.checkpoints.stored_weights())
        store_weights = partial(self.training_backend.store_weights, weights)
        self.checkpoints.save(step, store_weights, partial(self.save_model, step=step), progress)
        # Weights that no checkpoint had may be of a later step, which the trainer has saved by now.
        self.training_backend.delete_weights(earlier.difference(self.checkpoints.stored_weights()))
        return True

    def load(self) -> dict[str, Any] | None:
        """Return the progress of the newest checkpoint, or None. Trinity started from its weights."""
        checkpoint = self.checkpoints.newest()
        if checkpoint is None:
            return None
        earlier = set(self.checkpoints.stored_weights())
        self.checkpoints.remove_old()
        self.training_backend.delete_weights(earlier.difference(self.checkpoints.stored_weights()))
        return checkpoint.progress

    def save_model(self, folder: Path, step: int) -> None:
        """Write the model as a Hugging Face folder, with adapters merged.

        If the run stops before its last step, the trainer may have done one step more.
        """
        weights = self._saved_weights(step)
        if weights is None:
            self.actors.save_checkpoint(self._config.deadlines.save_checkpoint)
            weights = self.trinity_state.newest_weights()
        self.training_backend.save_model(self.facts.model_path, weights, folder)
        self.context.run_inputs.codec.save(folder)

    def _saved_weights(self, step: int) -> str | None:
        trainer_step = step * self._updates
        if self._is_training and trainer_step == self.event_consumer.last_trainer_step:
            self.actors.wait_until_trained(self._config.deadlines.save_checkpoint)
        return self.trinity_state.saved_weights(trainer_step)


def _call(method: Any, *arguments: object) -> Any:
    try:
        return ray.get(method.remote(*arguments))
    except RayError as error:
        raise coordinator_lost(error) from error
