"""Starting a Ray."""

from __future__ import annotations

import subprocess
from typing import Any

import psutil
import pytest

from astuner.backbone.cluster.connection import ray_connected

pytestmark = pytest.mark.verl


def test_a_start_that_took_too_long_leaves_nothing_and_is_tried_again(monkeypatch: pytest.MonkeyPatch):
    import ray

    started: list[subprocess.Popen[bytes]] = []

    def too_busy_at_first(**settings: Any) -> None:
        started.append(subprocess.Popen(["sleep", "600"]))
        if len(started) == 1:
            raise RuntimeError("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", too_busy_at_first)
    with ray_connected({}):
        first, second = started
        assert not psutil.pid_exists(first.pid)
        first.wait()
        assert second.poll() is None
    second.kill()
    second.wait()
