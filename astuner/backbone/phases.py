"""The phases of a run, each with a deadline after which the log says where it stands."""

from __future__ import annotations

import contextlib
import threading
from typing import Literal

from loguru import logger

from astuner.config.deadlines import DeadlinesConfig
from astuner.deadlines import rung
from astuner.stacks import shown, thread_stack
from astuner.task_rollout import RunningEpisodes

PhaseName = Literal["read_tasks", "load_model", "rollout", "update", "sync_weights", "validation", "save_checkpoint"]

_WORDS: dict[PhaseName, str] = {
    "read_tasks": "reading the tasks",
    "load_model": "loading the model",
    "rollout": "the rollout",
    "update": "the update",
    "sync_weights": "handing the weights to the engine",
    "validation": "the validation",
    "save_checkpoint": "saving",
}


def watched(
    name: PhaseName, deadlines: DeadlinesConfig, running: RunningEpisodes
) -> contextlib.AbstractContextManager[None]:
    """Have the log say where things stand if the block, phase `name`, passes its deadline; nothing is ended.

    One record each time: the phase, and the running episodes with their last calls and stacks, or, where none runs,
    the stack of this thread.
    """
    seconds: float | None = getattr(deadlines, name)
    thread = threading.current_thread()

    def say(taken: float) -> None:
        where = running.report() if running else f"{thread.name} stands at\n{shown(thread_stack(thread))}"
        logger.warning(
            "{} has taken {:.4g} s, longer than astuner.deadlines.{} ({:g} s), and goes on: {}",
            _WORDS[name], taken, name, seconds, where,
        )  # fmt: skip

    return rung(seconds, say, again=True)
