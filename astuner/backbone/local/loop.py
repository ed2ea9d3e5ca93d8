"""What the local backbone's loops have in common: optimiser, checkpoints, and an eye on spare cores."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from astuner.backbone.local.checkpoint import Checkpoints
from astuner.backbone.local.optimiser import Optimiser
from astuner.backbone.local.session import LocalSession
from astuner.backbone.local.threads import SpareCores
from astuner.backbone.local.update import PolicyUpdate
from astuner.backbone.loop import TrainingLoop
from astuner.backbone.reinforce import ReinforcementLoop
from astuner.backbone.step_credit import UpdateResult
from astuner.schema import Episode


@dataclass
class LocalLoop(TrainingLoop):
    """Trains the policy of this process.

    Attributes:
        session: policy, engine, state.
        algorithm: resolved.
        checkpoints: where progress is saved.
    """

    session: LocalSession
    checkpoints: Checkpoints
    _cores: SpareCores = field(default_factory=SpareCores, init=False)

    @cached_property
    def optimiser(self) -> Optimiser:
        """Moves the policy."""
        return Optimiser(self.session.policy.trainable(), self.config.trainer_common.optim, self.total_steps)

    def watching(self) -> contextlib.AbstractContextManager[object]:
        """Give threads back where cores are short."""
        return self._cores.watching()

    def write_checkpoint(self, progress: dict[str, Any]) -> None:
        """Write policy, optimiser and progress."""
        codec = self.session.ingredients.codec
        self.checkpoints.save(self.state.step, self.session.policy, self.optimiser, codec, progress)

    def read_checkpoint(self) -> dict[str, Any] | None:
        """Restore policy and optimiser."""
        return self.checkpoints.load(self.session.policy, self.optimiser)


@dataclass
class LocalReinforcementLoop(LocalLoop, ReinforcementLoop):
    """Learns from rewards in this process."""

    @cached_property
    def _update(self) -> PolicyUpdate:
        return PolicyUpdate(self.config, self.algorithm, self.session.policy, self.optimiser)

    def learn(self, usable: Sequence[Episode], number: int) -> UpdateResult:
        """Update the weights and hand them to the engine."""
        session = self.session
        session.engine.free_cache()
        session.policy.learning()
        with session.context.phase("update"):
            result = self._update.step(usable, number)
        session.sync_weights(session.engine, number)
        return result
