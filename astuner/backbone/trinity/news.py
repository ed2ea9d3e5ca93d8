"""What Trinity's processes tell the launcher's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from astuner.backbone.episode_worker import Reached, Said
from astuner.schema import Episode, Split


@dataclass(frozen=True)
class Running:
    """A process begins to run episodes.

    Attributes:
        actor_id: of Ray's.
        actor: its handle.
    """

    actor_id: str
    actor: Any


@dataclass(frozen=True)
class Ended:
    """An episode has come to an end.

    Attributes:
        split, step: of its batch.
        episode: the episode.
    """

    split: Split
    step: int
    episode: Episode


@dataclass(frozen=True)
class Done:
    """A share of a batch has come to an end, and each of its episodes was told of.

    Attributes:
        split, step: of the batch.
        tasks: how many of the batch's tasks it had.
        attempts: failed attempts at its episodes, which were run again.
    """

    split: Split
    step: int
    tasks: int
    attempts: Sequence[Episode]


@dataclass(frozen=True)
class Broken:
    """An error of astuner's in a process of the run, after which it cannot go on.

    Attributes:
        error: as raised there.
    """

    error: Exception


@dataclass(frozen=True)
class Credited:
    """A batch has its advantages and waits for the trainer.

    Attributes:
        step: the training step that it is of.
        episodes: the ids of those that are trained, in the order of the result.
        result: an `UpdateResult` without the update's own metrics; None where no episode can be learned from.
        samples: those that have a gradient, by episode and number of the sample.
    """

    step: int
    episodes: tuple[str, ...]
    result: Any
    samples: frozenset[tuple[str, int]]


@dataclass(frozen=True)
class Taken:
    """The trainer has experiences.

    Attributes:
        number: the trainer's own step that it takes them for.
        digests: of those that train anything, see `certificate`, by episode and number of the sample.
    """

    number: int
    digests: Mapping[tuple[str, int], str]


@dataclass(frozen=True)
class Measured:
    """Metrics of Trinity's.

    Attributes:
        role: `trainer` or `explorer`.
        number: of the role's own step.
        values: by Trinity's names.
    """

    role: str
    number: int
    values: Mapping[str, float]


News = Running | Ended | Done | Said | Reached | Broken | Credited | Taken | Measured
