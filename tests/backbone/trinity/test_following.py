"""What the launcher makes of the desk's news, and of none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest

from astuner.breakpoints import chosen
from astuner.config.root import AstunerConfig
from astuner.errors import BackboneError
from astuner.model_tuner import CallSettings
from astuner.schema import Task
from astuner.task_rollout import BatchRequest

pytestmark = pytest.mark.trinity

STALL = 2.0


@pytest.fixture(scope="module")
def following() -> Iterator[Any]:
    """A launcher's view of a desk, with both of Trinity's roles at work for ever."""
    from astuner.backbone.cluster.connection import ray_connected
    from astuner.backbone.cluster.environment import OWN_ENVIRONMENT, environment_set
    from astuner.backbone.episode_worker import AgentJob
    from astuner.backbone.trinity.desk import DeskJob, open_desk
    from astuner.backbone.trinity.following import Following

    config = AstunerConfig(asynchrony={"stall_timeout": STALL})
    folder = str(Path(__file__).parents[3])
    job = DeskJob(AgentJob(config, (), Path(), "model", chosen()), tinker=True, max_model_len=64, updates=1, runners=1)
    stage = SimpleNamespace(config=SimpleNamespace(log=SimpleNamespace(save_dir="logs")), refuse_ended=lambda **_: None)
    with (
        environment_set(OWN_ENVIRONMENT),
        ray_connected({"namespace": "following", "runtime_env": {"env_vars": {"PYTHONPATH": folder}}}),
    ):
        yield Following(config, open_desk(job), stage, last=4)


def run_a_batch(following: Any) -> None:
    request = BatchRequest((Task("t", "?"),), 1, "train", 1, 0, CallSettings())
    following.run(request, lambda _: None, lambda _: None)


def wait_for_an_update(following: Any) -> None:
    following.wait_for_update(1, 1)


@pytest.mark.parametrize("wait", [run_a_batch, wait_for_an_update])
def test_a_run_in_which_nothing_ends_is_ended_whatever_its_episodes_log(
    following: Any, wait: Callable[[Any], None]
) -> None:
    import ray

    from astuner.backbone.episode_worker import Said

    ended = Event()

    def log() -> None:
        while not ended.wait(0.1):
            ray.get(following.desk.post.remote(Said("DEBUG", "still here")))

    talking = Thread(target=log)
    talking.start()
    began = time.monotonic()
    try:
        with pytest.raises(BackboneError, match=r"for 2 s: .*stall_timeout is 2 s.*The same command goes on"):
            wait(following)
    finally:
        ended.set()
        talking.join()
    assert time.monotonic() - began >= STALL
