"""Events that Trinity's processes send to the launcher through the coordinator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from astuner.backbone.episode_workers.worker import BreakpointsReached, LogRecord
from astuner.schema import Episode, Split

SampleKey = tuple[str, int]
"""The id of an episode and the index of a sample in it."""

Digests = Mapping[SampleKey, str]
"""Digests of samples that have trained tokens; see `sample_digest`."""


@dataclass(frozen=True)
class EpisodesStarted:
    """An actor has started to run episodes.

    Attributes:
        actor_id: Ray's id of the actor.
        actor: its handle.
    """

    actor_id: str
    actor: Any


@dataclass(frozen=True)
class EpisodeFinished:
    """An episode has ended.

    Attributes:
        split: the split of its batch.
        step: the training step of its batch.
        episode: the episode.
    """

    split: Split
    step: int
    episode: Episode


@dataclass(frozen=True)
class ShareFinished:
    """A runner has finished its share of a batch; an `EpisodeFinished` was sent for each episode before.

    Attributes:
        split: the batch's split.
        step: the batch's training step.
        episodes: number of episodes in the share.
        attempts: failed attempts at episodes that were retried.
    """

    split: Split
    step: int
    episodes: int
    attempts: Sequence[Episode]


@dataclass(frozen=True)
class WorkerFailed:
    """A process has raised an error that ends the run.

    Attributes:
        error: the exception.
        step: the training step that cannot be trained; None if no step can go on.
    """

    error: Exception
    step: int | None = None


@dataclass(frozen=True)
class AdvantagesReady:
    """The advantages of a training step are computed and its experiences wait for the trainer.

    Attributes:
        step: the training step.
        episode_ids: the episodes that are trained, in the order of `result`.
        result: an `UpdateResult` without the update's metrics; None if no episode can be trained.
        sample_keys: the samples that have a gradient.
    """

    step: int
    episode_ids: tuple[str, ...]
    result: Any
    sample_keys: frozenset[SampleKey]


@dataclass(frozen=True)
class BatchConsumed:
    """The trainer has read the experiences for one trainer step.

    Attributes:
        trainer_step: the trainer's step. A training step consists of `mini_batch_num` trainer steps.
        digests: the digests of its samples.
    """

    trainer_step: int
    digests: Digests


@dataclass(frozen=True)
class MetricsLogged:
    """Trinity has logged metrics.

    Attributes:
        role: `trainer` or `explorer`.
        step: the step of that actor.
        values: metrics under Trinity's names.
    """

    role: str
    step: int
    values: Mapping[str, float]


Event = (
    EpisodesStarted
    | EpisodeFinished
    | ShareFinished
    | LogRecord
    | BreakpointsReached
    | WorkerFailed
    | AdvantagesReady
    | BatchConsumed
    | MetricsLogged
)
