"""Turns events from Trinity's processes into batches of episodes and trainer steps for the launcher."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from loguru import logger
from ray.exceptions import RayError

from astuner.backbone.episode_workers.host import longest_wait, report_batch
from astuner.backbone.episode_workers.messages import BreakpointsReached, LogRecord
from astuner.backbone.training.checkpoints import RESUME_HINT
from astuner.backbone.trinity.actors import TrinityActors
from astuner.backbone.trinity.coordinator import (
    TRAINER,
    AdvantagesReady,
    BatchConsumed,
    Digests,
    EpisodeFinished,
    EpisodesStarted,
    Event,
    MetricsLogged,
    ShareFinished,
    WorkerFailed,
)
from astuner.config.root import AstunerConfig
from astuner.debugging.breakpoints import add_reached_tags
from astuner.errors import BackboneError, first_line
from astuner.schema import Episode, Split
from astuner.system.signals import signals_deferred
from astuner.task_rollout.rollout import BatchRequest, OnEpisode, failed_episodes

_POLL_SECONDS = 0.5
# Added to the time after which a runner replaces a worker that is stuck.
_GRACE_SECONDS = 60.0


def coordinator_lost(error: Exception) -> BackboneError:
    """Return the error to raise if the coordinator does not answer."""
    return BackboneError(f"the process that collects the run's episodes has died: {first_line(error)}. {RESUME_HINT}")


@dataclass(frozen=True)
class TrainedStep:
    """A training step that Trinity's trainer has finished, with digests of the samples that it received."""

    step: int
    advantages: AdvantagesReady
    digests: Digests
    metrics: Sequence[Mapping[str, float]]


@dataclass
class _BatchProgress:
    """The state of a batch.

    Attributes:
        unreported: finished episodes that the caller has not received yet.
        episodes: all finished episodes, failed attempts included.
        done: number of episodes in the finished shares.
    """

    unreported: list[Episode] = field(default_factory=list)
    episodes: list[Episode] = field(default_factory=list)
    done: int = 0


@dataclass
class EventConsumer:
    """Reads the coordinator's events and waits for batches and trainer steps.

    Attributes:
        last_trainer_step: number of the trainer's last step; 0 if nothing is trained.
        trainer_step: number of the trainer's latest finished step.
        pending: training steps whose advantages are computed and whose update is not collected yet.
        digests: digests of the samples trained in each trainer step.
    """

    config: AstunerConfig
    coordinator: Any
    actors: TrinityActors
    last_trainer_step: int = 0
    trainer_step: int = 0
    pending: dict[int, AdvantagesReady] = field(default_factory=dict)
    metrics: dict[int, Mapping[str, float]] = field(default_factory=dict)
    digests: dict[int, Digests] = field(default_factory=dict)
    _failure: WorkerFailed | None = None
    # Actor id to handle and pending ping.
    _runners: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    _batches: dict[tuple[Split, int], _BatchProgress] = field(default_factory=lambda: defaultdict(_BatchProgress))

    @property
    def backlog(self) -> int:
        """Number of training steps that are sampled and not trained yet."""
        return len(self.pending)

    def run(self, request: BatchRequest, on_episode: OnEpisode, on_attempt: OnEpisode) -> list[Episode]:
        """Wait for a batch and return its episodes, ordered by task and repeat.

        A retried episode is preceded by its failed attempts. If a signal interrupts the wait for a training step,
        another call continues it.

        Raises:
            BackboneError: a process of the run died, or no episode ended within its time limits or within
                `asynchrony.stall_timeout`.
        """
        key = (request.split, request.step)
        is_training, size = request.split == "train" and self.last_trainer_step > 0, len(request.episodes())

        def is_done() -> bool:
            batch = self._batches[key]
            while batch.unreported:
                episode = batch.unreported.pop(0)
                on_attempt(episode)
                on_episode(episode)
            return batch.done == size or (is_training and request.step in self.pending)

        timeout = min(longest_wait(self.config) + _GRACE_SECONDS, self.config.asynchrony.stall_timeout)
        self._wait(is_done, request.step, f"the episodes of {request.split} step {request.step}", timeout)
        episodes = list(self._batches[key].episodes)
        if not is_training:
            del self._batches[key]
        episodes += self._lost_episodes(request, episodes)
        return report_batch(episodes, request)

    def wait_for_update(self, step: int, trainer_step: int) -> None:
        """Wait until training step `step` has its advantages and the trainer has finished `trainer_step`.

        Raises:
            BackboneError: a process of the run died, or nothing happened within `asynchrony.stall_timeout`.
        """
        timeout = self.config.asynchrony.stall_timeout

        def is_done() -> bool:
            return step in self.pending and trainer_step <= self.trainer_step

        self._wait(is_done, step, f"the update of step {step}", timeout)

    def take_update(self, step: int, trainer_steps: range) -> TrainedStep:
        """Forget a training step that `wait_for_update` waited for; return the results of its trainer steps."""
        self._batches.pop(("train", step), None)
        digests = {key: digest for number in trainer_steps for key, digest in self.digests.pop(number, {}).items()}
        metrics = [self.metrics.pop(number, {}) for number in trainer_steps]
        return TrainedStep(step, self.pending.pop(step), digests, metrics)

    def _wait(self, is_done: Callable[[], bool], step: int, awaited: str, timeout: float) -> None:
        last_event = time.monotonic()
        while not is_done():
            # The steps before a step that cannot be trained are awaited, and its own episodes are returned first.
            if self._failure is not None and (self._failure.step is None or self._failure.step <= step):
                raise self._failure.error
            with signals_deferred():  # no event is lost
                try:
                    events: Sequence[Event] = ray.get(self.coordinator.read_events.remote(_POLL_SECONDS))
                except RayError as error:
                    raise coordinator_lost(error) from error
                for event in events:
                    self._handle(event)
            if any(not isinstance(event, LogRecord | BreakpointsReached) for event in events):
                last_event = time.monotonic()
                continue
            self.actors.check_alive(training_done=self.trainer_step >= self.last_trainer_step)
            self._check_runners_alive()  # after the explorer, with which they die
            if time.monotonic() - last_event > timeout:
                raise BackboneError(
                    f"no progress on {awaited} for {timeout:.0f} s: a Trinity process is stuck "
                    f"(asynchrony.stall_timeout is {self.config.asynchrony.stall_timeout:.0f} s). {RESUME_HINT}; "
                    f"Trinity's logs are in {self.actors.config.log.save_dir}"
                )

    def _check_runners_alive(self) -> None:
        """Check that the processes that run episodes are alive: Trinity would wait for a dead one's episodes."""
        if self.config.asynchrony.over_rollout:
            return
        for actor_id, (actor, ping) in list(self._runners.items()):
            if not ray.wait([ping], timeout=0)[0]:  # the runner is busy
                continue
            try:
                ray.get(ping)
            except RayError as error:
                raise BackboneError(
                    f"a process that ran episodes died with all of them: {first_line(error)}. If it ran out of memory, "
                    f"lower rollout.max_env_worker. {RESUME_HINT}"
                ) from error
            self._ping_runner(actor_id, actor)

    def _ping_runner(self, actor_id: str, actor: Any) -> None:
        self._runners[actor_id] = actor, actor.__ray_ready__.remote()

    def _handle(self, event: Event) -> None:
        match event:
            case EpisodesStarted(actor_id, actor):
                self._ping_runner(actor_id, actor)
            case EpisodeFinished(split, step, episode):
                batch = self._batches[split, step]
                batch.unreported.append(episode)
                batch.episodes.append(episode)
            case ShareFinished(split, step, done, attempts):
                batch = self._batches[split, step]
                batch.episodes += attempts
                batch.done += done
            case AdvantagesReady(step):
                self.pending[step] = event
            case BatchConsumed(trainer_step, digests):
                self.digests[trainer_step] = digests
            case MetricsLogged(role, step, values) if role == TRAINER:
                self.metrics[step], self.trainer_step = values, max(self.trainer_step, step)
            case LogRecord(level, text):
                logger.log(level, "{}", text)
            case BreakpointsReached(tags):
                add_reached_tags(tags)
            case WorkerFailed():
                self._failure = self._failure or event
            case _:
                pass

    def _lost_episodes(self, request: BatchRequest, episodes: list[Episode]) -> list[Episode]:
        ended = {(episode.task.task_id, episode.repeat_index) for episode in episodes}
        missing = frozenset((task.task_id, repeat) for task, repeat in request.episodes()) - ended
        if not missing:
            return []
        reason = "the process that ran it was lost; see Trinity's logs"
        if self.config.asynchrony.over_rollout:
            reason = f"its task was among the slowest and was dropped (asynchrony.over_rollout), or {reason}"
        return failed_episodes(replace(request, only=missing), "worker", reason)
