"""The reinforcement-learning loop beside Trinity's explorer and trainer, which go on by themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from loguru import logger

from astuner.backbone.ingredients import call_settings
from astuner.backbone.reinforce import ReinforcementLoop
from astuner.backbone.step_credit import UpdateResult
from astuner.backbone.trinity.certificate import SampleName, refuse_other
from astuner.backbone.trinity.checkpoint import TrinityCheckpoints
from astuner.backbone.trinity.desk import Course
from astuner.backbone.trinity.metrics import update_metrics
from astuner.backbone.trinity.news import Credited
from astuner.backbone.trinity.rules import steps_ahead
from astuner.backbone.trinity.session import TrinitySession
from astuner.errors import BackboneError
from astuner.schema import Episode
from astuner.task_rollout import BatchRequest


@dataclass(frozen=True)
class _Learned:
    """What is known of a training step that the trainer has done.

    Attributes:
        credited: of its episodes.
        trained: digests of the samples that arrived there.
        measured: in each of its optimiser steps.
    """

    credited: Credited
    trained: Mapping[SampleName, str]
    measured: Sequence[Mapping[str, float]]


@dataclass
class TrinityLoop(ReinforcementLoop):
    """Follows the explorer's batches and the trainer's steps, and records them as any other backbone does.

    Attributes:
        session: the roles, and what is known of them.
        algorithm: resolved; it has a rule.
        checkpoints: where progress is saved.
    """

    session: TrinitySession
    checkpoints: TrinityCheckpoints
    _learned: _Learned | None = None

    def step(self) -> str:
        """Follow the next training step; the first lets explorer and trainer begin."""
        if not self.session.begun:
            self.session.begin(self._course())
        return super().step()

    def _course(self) -> Course:
        run, common = self.config, self.config.trainer_common
        request = BatchRequest(
            tasks=(),
            repeats=run.rollout.num_repeat,
            split="train",
            step=0,
            seed=common.seed,
            settings=call_settings(run, validation=False),
        )
        hold = common.test_freq if self.session.ingredients.tasks.validation else self.total_steps
        return Course(
            self.order, request, self.state.step, self.total_steps, steps_ahead(run), run.asynchrony.max_staleness, hold
        )

    def wait_for_learning(self, number: int) -> None:
        """Wait for the trainer's steps, of which a step without any reward has some, too."""
        following, updates = self.session.following, self.session.updates
        with self.session.context.phase("update"):
            credited = following.wait_for_update(number, number * updates)
        own = range((number - 1) * updates + 1, number * updates + 1)
        trained = {name: found for one in own for name, found in following.taken.pop(one, {}).items()}
        self._learned = _Learned(credited, trained, [following.measured.pop(one, {}) for one in own])

    def learn(self, usable: Sequence[Episode], number: int) -> UpdateResult:
        """Return what the trainer has learned from the step's episodes, and make sure of it."""
        assert self._learned is not None
        credited = self._learned.credited
        refuse_other(usable, credited.samples, self._learned.trained, number)
        moved = update_metrics(self._learned.measured) | {"backlog/steps": self.session.following.waiting}
        self._refuse_stale(moved, number)
        if credited.result is None:
            return UpdateResult(moved, (), signal=False)
        return _for(usable, credited.episodes, credited.result, moved)

    def _refuse_stale(self, metrics: Mapping[str, float], step: int) -> None:
        most, found = self.config.asynchrony.max_staleness, metrics.get("staleness/max", 0.0)
        if found > most:
            raise BackboneError(
                f"step {step} was sampled with weights that are {found:.0f} steps old, and astuner.asynchrony."
                f"max_staleness is {most}: the explorer did not wait as it was told. This is a bug; please report it"
            )

    def validate(self) -> None:
        """Measure the policy while the explorer waits, and let it go on."""
        super().validate()
        self.session.go_on(self.state.step)

    def write_checkpoint(self, progress: dict[str, Any]) -> None:
        """Keep what Trinity's trainer saved after this step; it saves at save_freq and at the end only."""
        weights = self.session.saved_weights()
        if weights is None:
            logger.warning("step {} is not in a checkpoint; the last one before it stays", self.state.step)
            return
        before = set(self.checkpoints.kept())
        side = self.session.side
        self.checkpoints.save(self.state.step, partial(side.keep, weights), self.session.save_model, progress)
        # Those only: the trainer, which is ahead, may have saved later ones by now.
        side.forget(before.difference(self.checkpoints.kept()))

    def what_is_kept(self) -> str:
        """Say what an interrupted run can go on from: Trinity's trainer, which is at work, is not asked to save."""
        newest = self.checkpoints.newest()
        if newest is None:
            return "no checkpoint was due yet (trainer_common.save_freq), so there is nothing to go on from"
        return f"the same command goes on from the checkpoint of step {newest.progress['step']}"

    def read_checkpoint(self) -> dict[str, Any] | None:
        """Return the progress that the session was started to go on from."""
        found = self.checkpoints.newest()
        return found.progress if found else None


def _for(
    usable: Sequence[Episode], trained: Sequence[str], result: UpdateResult, moved: Mapping[str, float]
) -> UpdateResult:
    """Return a result with its metrics, for these episodes; one whose experiences were lost was not trained."""
    place = {name: index for index, name in enumerate(trained)}
    places = [place.get(episode.episode_id) for episode in usable]
    return replace(
        result,
        metrics={**result.metrics, **moved},
        advantages=tuple(0.0 if at is None else result.advantages[at] for at in places),
        samples=tuple(() if at is None else result.samples[at] for at in places),
    )
