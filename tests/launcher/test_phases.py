"""A phase that exceeds its deadline is logged repeatedly and continues."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from astuner.backbone.local.policy import Policy
from astuner.backbone.training import run_inputs
from astuner.backbone.training.progress import PhaseName, warn_if_slow
from astuner.config.timing import DeadlinesConfig
from astuner.debugging.deadlines import alarm
from astuner.task_rollout.active_episodes import ActiveEpisodes
from tests.launcher.conftest import Command

Log = list[str]


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait, for ten seconds at most."""
    end = time.monotonic() + 10
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)


def test_a_warning_is_logged_at_the_deadline_and_at_each_multiple_with_the_stack(log: Log):
    with warn_if_slow("update", DeadlinesConfig(update=0.05), ActiveEpisodes()):
        wait_until(lambda: len(log) >= 3)
    warnings = log[:3]
    assert all(
        "the update has taken " in line and "astuner.deadlines.update (0.05 s), and continues" in line
        for line in warnings
    )
    assert all("the stack of MainThread:" in line and "wait_until" in line for line in warnings)
    ended = len(log)
    threading.Event().wait(0.2)
    assert len(log) <= ended + 1  # one may have been on its way


def test_an_alarm_that_fails_is_logged_and_leaves_the_others(log: Log):
    called = threading.Event()
    with alarm(0.01, lambda _: 1 / 0), alarm(0.02, lambda _: called.set()):
        assert called.wait(10)
    assert any("an alarm failed after 0.01 s" in line for line in log)


def test_a_phase_in_time_and_one_without_a_deadline_leave_no_word(log: Log):
    with warn_if_slow("update", DeadlinesConfig(update=60), ActiveEpisodes()):
        pass
    with warn_if_slow("update", DeadlinesConfig(update=None), ActiveEpisodes()):
        threading.Event().wait(0.1)
    assert log == []


@pytest.mark.parametrize("parallel", [1, 4])
def test_an_overlong_rollout_names_its_episodes_calls_and_stacks(astuner: Command, parallel: int):
    words = ("rollout.agentscope_workflow='agents->HangsAwaiting'", "rollout.episode_timeout=4")
    words += ("debug.debug_first_n_tasks=1", f"debug.debug_max_parallel={parallel}", "deadlines.rollout=0.6")
    ended = astuner("--conf", "run.yaml", "--backbone=debug", *(f"astuner.{word}" for word in words))
    assert ended.code == 0, ended.out
    _, _, warning = ended.out.partition("the rollout has taken ")
    assert "astuner.deadlines.rollout (0.6 s), and continues: 1 episode running" in warning
    assert "-1: for " in warning
    assert "last finished LLM call train-000001-" in warning
    assert "await asyncio.sleep(1e6)" in warning


def test_training_has_all_phases(train: Command, monkeypatch: pytest.MonkeyPatch):
    titles: dict[PhaseName, str] = {
        "read_tasks": "reading the tasks",
        "load_model": "loading the model",
        "rollout": "the rollout",
        "update": "the update",
        "sync_weights": "the weight sync",
        "validation": "the validation",
        "save_checkpoint": "saving",
    }
    deadlines = {phase: f"{0.0005 + number * 0.0001:g}" for number, phase in enumerate(titles)}
    # Each warning asks the workers what they do, which would keep the clock busy during the next phases.
    deadlines["rollout"] = "0.05"

    def slow_down(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def slowly(*arguments: Any, **options: Any) -> Any:
            time.sleep(0.05)  # a model and tasks this small are ready before the deadline
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, slowly)

    slow_down(Policy, "full_weights")
    slow_down(run_inputs, "read_tasks")
    settings = (f"deadlines.{phase}={seconds}" for phase, seconds in deadlines.items())
    ended = train(*settings, "trainer_common.total_training_steps=1")
    assert ended.code == 0, ended.out
    warnings = set(
        re.findall(r"([a-z][a-z ]*) has taken [\d.]+ s, longer than astuner\.deadlines\.(\S+ \(\S+ s\))", ended.out)
    )
    assert warnings == {(title, f"{phase} ({deadlines[phase]} s)") for phase, title in titles.items()}
    assert ended.out.count(" has taken ") == len(
        re.findall(r" has taken .* longer than astuner\.deadlines\.", ended.out)
    )
