"""The reinforcement-learning loop on verl's workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from astuner.backbone.reinforce import ReinforcementLoop
from astuner.backbone.step_credit import UpdateResult
from astuner.backbone.verl.checkpoint import VerlCheckpoints
from astuner.backbone.verl.session import VerlSession
from astuner.backbone.verl.update import VerlUpdate
from astuner.schema import Episode


@dataclass
class VerlLoop(ReinforcementLoop):
    """Rolls out on verl's engines and learns on its workers.

    Attributes:
        session: trainer, engines, episode workers, state.
        algorithm: resolved; it has a rule.
        checkpoints: where progress is saved.
    """

    session: VerlSession
    checkpoints: VerlCheckpoints

    @cached_property
    def _update(self) -> VerlUpdate:
        tokenizer = self.session.ingredients.tokenizer
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        return VerlUpdate(
            self.config, self.algorithm, self.session.trainer, self.session.dtype, self.total_steps, pad or 0
        )

    def train(self) -> None:
        """Hand the engines the weights to begin with, and do the steps that are left."""
        self.session.sync()
        super().train()

    def learn(self, usable: Sequence[Episode], number: int) -> UpdateResult:
        """Update the weights and hand them to the engines."""
        session = self.session
        session.trainer.free_engines()
        with session.context.phase("update"):
            result = self._update.step(usable, number)
        with session.context.phase("sync_weights"):
            session.push_weights(number)
        return result

    def write_checkpoint(self, progress: dict[str, Any]) -> None:
        """Have verl's workers write, and the model beside it."""
        self.checkpoints.save(self.state.step, self.session.trainer, self.session.save_model, progress)

    def read_checkpoint(self) -> dict[str, Any] | None:
        """Have verl's workers read."""
        return self.checkpoints.load(self.session.trainer)
