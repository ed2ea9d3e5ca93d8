"""An environment that kills its service once."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil

from astuner.schema import Action, StepResult
from tests.env_service.environments import GuessNumber


class KillsItsService(GuessNumber):
    """The first step of all instances kills the service; `folder` remembers that."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = Path(folder)

    def step(self, action: Action) -> StepResult:
        try:
            (self._folder / "killed").touch(exist_ok=False)
        except FileExistsError:
            return super().step(action)
        service = psutil.Process(os.getppid()).parent()  # the parent of the process that forks instances
        assert service is not None
        service.send_signal(signal.SIGKILL)
        raise RuntimeError("the service has been killed")
