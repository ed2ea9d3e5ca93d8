"""Starts, drives, monitors and stops Trinity's explorer and trainer actors.

Trinity's own `run_stage` reports success even if an actor failed, and shuts Ray down before the caller can query it.
This module therefore calls the actors' methods directly.
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

from astuner.backbone.training.checkpoints import RESUME_HINT
from astuner.backbone.trinity.coordinator import ROLLOUT_MODEL
from astuner.errors import BackboneError, first_line

_ERROR = re.compile(r"(?:Error in (?:Trainer|Explorer)|Error during explorer preparation)")
_POLL_SECONDS, _HEALTH_CHECK_SECONDS = 0.1, 1.0


@dataclass
class TrinityActors:
    """Handles of Trinity's explorer and trainer.

    Every method with a `timeout` (in seconds; None waits forever) raises BackboneError if the actor fails or does not
    finish in time.

    Attributes:
        config: Trinity's configuration, checked by Trinity.
        trainer: the trainer actor; None if nothing is trained.
        check_backend: raises if a process that both actors depend on has died.
    """

    config: Config
    explorer: Any
    trainer: Any
    check_backend: Callable[[], None] = lambda: None
    _running: dict[str, Any] = field(default_factory=dict)

    def prepare(self, timeout: float | None) -> None:
        """Prepare both actors and load the trainer's weights into the explorer."""
        actors = [self.explorer] + ([self.trainer] if self.trainer else [])
        self._get("preparing", [actor.prepare.remote() for actor in actors], timeout)
        if self.trainer:
            # The trainer goes first: otherwise a resumed explorer would start from the base model.
            self._push_weights(timeout)
            if self.config.synchronizer.sync_style != SyncStyle.FULLY_ASYNC:  # which pulls weights itself
                self.pull_weights(timeout)

    def sync_weights(self, timeout: float | None) -> None:
        """Copy the trainer's current weights to the explorer; both actors must be idle."""
        self._push_weights(timeout)
        self.pull_weights(timeout)

    def _push_weights(self, timeout: float | None) -> None:
        self._get("sending the trainer's weights", [self.trainer.sync_weight.remote()], timeout)

    def pull_weights(self, timeout: float | None) -> None:
        """Load the trainer's weights into the explorer while the trainer waits for experiences."""
        self._get("updating the explorer's weights", [self.explorer.sync_weight.remote()], timeout)

    def wait_for_pushed_weights(self, trainer_step: int, timeout: float | None) -> None:
        """Wait until the trainer has pushed the weights of `trainer_step` to the explorer."""
        model, started = ray.get_actor(ROLLOUT_MODEL), time.monotonic()
        doing = "updating the explorer's weights"
        while self._get(doing, [model.get_model_version.remote()], timeout)[0] < trainer_step:
            if timeout is not None and time.monotonic() - started > timeout:
                raise _timed_out(doing, timeout)
            time.sleep(_POLL_SECONDS)

    def save_checkpoint(self, timeout: float | None) -> None:
        """Make the trainer save its current state."""
        self._get("saving a checkpoint", [self.trainer.save_checkpoint.remote()], timeout)

    def start(self) -> None:
        """Start exploring and training."""
        self._running = {"explorer": self.explorer.explore.remote(), "trainer": self.trainer.train.remote()}

    def start_evaluation(self, timeout: float | None) -> None:
        """Make the explorer start the evaluation that the coordinator has queued."""
        self._get("starting a validation", [self.explorer.eval.remote()], timeout)

    def wait_until_trained(self, timeout: float | None) -> None:
        """Wait until the trainer has finished all its steps and saved the weights of the last step."""
        self._get("saving the last step", [self._running["trainer"]], timeout)

    def check_alive(self, *, training_done: bool) -> None:
        """Raise BackboneError, with the actor's log, if one has stopped; the trainer may have if `training_done`."""
        self.check_backend()
        for role, call in self._running.items():
            if role == "trainer" and training_done:
                continue
            done, _ = ray.wait([call], timeout=0)
            if done:
                self._get(f"running the {role}", done, 0.0)
                raise BackboneError(f"Trinity's {role} stopped early: {self._logged_error(role)}. {RESUME_HINT}")

    def stop(self) -> None:
        """Kill both actors and the processes that they started."""
        for actor in filter(None, (self.explorer, self.trainer)):
            ray.kill(actor)

    def _get(self, doing: str, references: Sequence[Any], timeout: float | None) -> Any:
        """Return the results of remote calls; meanwhile check the backend, whose death Trinity does not report."""
        started, pending = time.monotonic(), list(references)
        try:
            while pending:
                done, pending = ray.wait(pending, num_returns=len(pending), timeout=_HEALTH_CHECK_SECONDS)
                ray.get(done)  # raises what the call raised
                if pending and timeout is not None and time.monotonic() - started > timeout:
                    raise _timed_out(doing, timeout)
                self.check_backend()
            return ray.get(list(references))
        except RayTaskError as error:
            raise BackboneError(f"Trinity failed while {doing}: {first_line(error.cause)}. {RESUME_HINT}") from error
        except RayError as error:
            raise BackboneError(f"a Trinity process died while {doing}: {first_line(error)}. {RESUME_HINT}") from error

    def _logged_error(self, role: str) -> str:
        """Return the last error in an actor's log file; Trinity writes errors there and raises nothing."""
        folder = Path(self.config.log.save_dir)
        lines = [line for file in sorted(folder.rglob(f"{role}.log")) for line in file.read_text().splitlines()]
        starts = [number for number, line in enumerate(lines) if _ERROR.search(line)]
        if not starts:
            return f"its log in {folder} gives no reason"
        errors = [line for line in lines[starts[-1] + 1 :] if re.search(r"\] \S*(?:Error|Exception|Iteration)\b", line)]
        # The last one is the root cause: an error raised in a worker is nested in the trainer's own error.
        return f"{(errors or [lines[starts[-1]]])[-1].partition('] ')[2]} (log: {folder})"


def _timed_out(doing: str, timeout: float) -> BackboneError:
    return BackboneError(f"Trinity did not finish {doing} within {timeout:.0f} s. {RESUME_HINT}")


@contextlib.contextmanager
def trinity_actors(config: Config, trainer_class: Any, check_backend: Callable[[], None]) -> Iterator[TrinityActors]:
    """Run the explorer and, in mode `both`, the trainer during the block.

    Args:
        config: Trinity's configuration, checked by Trinity.
        check_backend: raises if a process that both actors depend on has died.
    """
    actors = TrinityActors(config, None, None, check_backend)
    try:
        if config.mode == "both":
            actors.trainer = trainer_class.get_actor(config)
        actors.explorer = Explorer.get_actor(config)
        yield actors
    finally:
        actors.stop()
