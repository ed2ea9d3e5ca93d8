"""Trinity's explorer and trainer, started, watched and ended.

Trinity's own `run_stage` reports success after either has failed, and ends Ray before anything can be asked. So they
are driven here by the same calls of theirs.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from trinity.common.config import Config
from trinity.common.constants import SyncStyle
from trinity.explorer.explorer import Explorer

from astuner.backbone.trinity.desk import SAMPLER
from astuner.errors import BackboneError
from astuner.model_tuner import first_line

_ERROR = re.compile(r"(?:Error in (?:Trainer|Explorer)|Error during explorer preparation)")
_GOES_ON = "The same command goes on from the last checkpoint"
_POLL_SECONDS, _LOOK_SECONDS = 0.1, 1.0


@dataclass
class Stage:
    """The two roles.

    Attributes:
        config: Trinity's, checked.
        explorer, trainer: the actors; no trainer where nothing is trained.
        alive: raises where something else that both need has ended.
    """

    config: Config
    explorer: Any
    trainer: Any
    alive: Callable[[], None] = lambda: None
    _works: dict[str, Any] = field(default_factory=dict)

    def prepare(self, patience: float | None) -> None:
        """Have both get ready, and the explorer take the trainer's weights.

        Raises:
            BackboneError: one could not, or not in time.
        """
        both = [self.explorer] + ([self.trainer] if self.trainer else [])
        self._get("getting ready", [role.prepare.remote() for role in both], patience)
        if self.trainer:
            # One after the other: the explorer would begin with the model as it was before a resume.
            self._hand_over(patience)
            if self.config.synchronizer.sync_style != SyncStyle.FULLY_ASYNC:  # which takes them by itself
                self.take_weights(patience)

    def sync(self, patience: float | None) -> None:
        """Have the explorer take the trainer's weights as they are; both must be idle.

        Raises:
            BackboneError: it could not, or not in time.
        """
        self._hand_over(patience)
        self.take_weights(patience)

    def _hand_over(self, patience: float | None) -> None:
        self._get("handing over the weights", [self.trainer.sync_weight.remote()], patience)

    def take_weights(self, patience: float | None) -> None:
        """Have the explorer take the trainer's weights, while the trainer waits for experiences.

        Raises:
            BackboneError: it could not, or not in time.
        """
        self._get("taking the weights", [self.explorer.sync_weight.remote()], patience)

    def wait_for_weights(self, number: int, patience: float | None) -> None:
        """Wait until the explorer, which waits for the trainer's weights by itself, has those of its step `number`.

        Raises:
            BackboneError: it has not got them in time.
        """
        model, began = ray.get_actor(SAMPLER), time.monotonic()
        while self._get("taking the weights", [model.get_model_version.remote()], patience)[0] < number:
            if patience is not None and time.monotonic() - began > patience:
                raise BackboneError(_late("taking the weights", patience))
            time.sleep(_POLL_SECONDS)

    def save(self, patience: float | None) -> None:
        """Have the trainer save what it has.

        Raises:
            BackboneError: it could not, or not in time.
        """
        self._get("saving", [self.trainer.save_checkpoint.remote()], patience)

    def begin(self) -> None:
        """Let both work."""
        self._works = {"explorer": self.explorer.explore.remote(), "trainer": self.trainer.train.remote()}

    def evaluate(self, patience: float | None) -> None:
        """Have the explorer begin what the desk was asked for.

        Raises:
            BackboneError: it could not, or not in time.
        """
        self._get("beginning a validation", [self.explorer.eval.remote()], patience)

    def steps_done(self, patience: float | None) -> None:
        """Wait until the trainer has done all its steps and saved.

        Raises:
            BackboneError: it did not, or not in time.
        """
        self._get("saving the last step", [self._works["trainer"]], patience)

    def refuse_ended(self, *, trained: bool) -> None:
        """Make sure that both still work, and what they need is there.

        Args:
            trained: whether the trainer may have ended: it has done all its steps.

        Raises:
            BackboneError: one has ended; with what its log says.
        """
        self.alive()
        for role, work in self._works.items():
            if role == "trainer" and trained:
                continue
            done, _ = ray.wait([work], timeout=0)
            if done:
                self._get(f"{role}: working", done, 0.0)
                raise BackboneError(f"Trinity's {role} stopped before its time: {self._last_words(role)}. {_GOES_ON}")

    def end(self) -> None:
        """End both, and with them what they have started: nothing that they hold is wanted any more."""
        for role in filter(None, (self.explorer, self.trainer)):
            ray.kill(role)

    def _get(self, doing: str, references: Sequence[Any], patience: float | None) -> Any:
        """Return the results; meanwhile see whether what the roles need is still there, as Trinity would not say."""
        began, waiting = time.monotonic(), list(references)
        try:
            while waiting:
                done, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_LOOK_SECONDS)
                ray.get(done)  # whatever one has raised
                if waiting and patience is not None and time.monotonic() - began > patience:
                    raise BackboneError(_late(doing, patience))
                self.alive()
            return ray.get(list(references))
        except RayTaskError as error:
            raise BackboneError(f"Trinity failed ({doing}): {first_line(error.cause)}. {_GOES_ON}") from error
        except RayError as error:
            raise BackboneError(
                f"a process of Trinity's died while {doing}: {first_line(error)}. {_GOES_ON}"
            ) from error

    def _last_words(self, role: str) -> str:
        """Return the last error in a role's log: Trinity writes it there and raises nothing."""
        folder = Path(self.config.log.save_dir)
        lines = [line for file in sorted(folder.rglob(f"{role}.log")) for line in file.read_text().splitlines()]
        began = [number for number, line in enumerate(lines) if _ERROR.search(line)]
        if not began:
            return f"its log, {folder}, does not say why"
        errors = [line for line in lines[began[-1] + 1 :] if re.search(r"\] \S*(?:Error|Exception|Iteration)\b", line)]
        # The last one: what a process of the trainer's raised stands within what the trainer raised for it.
        return f"{(errors or [lines[began[-1]]])[-1].partition('] ')[2]} (log: {folder})"


def _late(doing: str, patience: float) -> str:
    return f"Trinity was not done after {patience:.0f} s ({doing}). {_GOES_ON}"


@contextlib.contextmanager
def stage(config: Config, trainer_class: Any, alive: Callable[[], None]) -> Iterator[Stage]:
    """Start explorer and trainer for the block.

    Args:
        config: Trinity's, checked.
        trainer_class: Trinity's `Trainer`, or one derived of it.
        alive: raises where something else that both need has ended.
    """
    running = Stage(config, None, None, alive)
    try:
        if config.mode == "both":
            running.trainer = trainer_class.get_actor(config)
        running.explorer = Explorer.get_actor(config)
        yield running
    finally:
        running.end()
