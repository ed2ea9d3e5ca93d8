"""Where Trinity's metrics go: to the launcher (`monitor_type`)."""

from __future__ import annotations

from typing import Any

from trinity.utils.monitor import Monitor

from astuner.backbone.trinity.desk import desk
from astuner.backbone.trinity.news import Measured


class DeskMonitor(Monitor):
    """Tells the launcher of each step's metrics."""

    def __init__(self, project: str, group: str, name: str, role: str, config: Any = None) -> None:
        super().__init__(project, name, role, config)
        self._desk = desk()

    def log(self, data: dict[str, Any], step: int, commit: bool = False) -> None:
        """Send the numbers of a step."""
        numbers = {name: float(value) for name, value in data.items() if isinstance(value, int | float)}
        self._desk.post.remote(Measured(self.role, step, numbers))

    def close(self) -> None:
        """Do nothing."""
