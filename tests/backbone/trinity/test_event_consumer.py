"""Timeouts and interruptions of the launcher's event consumer."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread, Timer
from types import SimpleNamespace
from typing import Any

import pytest

from astuner.config.root import AstunerConfig
from astuner.debugging.breakpoints import active_breakpoints
from astuner.errors import BackboneError
from astuner.model_tuner.chat_options import CallSettings
from astuner.schema import Episode, Task
from astuner.task_rollout.rollout import BatchRequest

pytestmark = pytest.mark.trinity

STALL = 2.0


@pytest.fixture(scope="module")
def event_consumer() -> Iterator[Any]:
    """An event consumer with a coordinator and two actors that never stop."""
    from astuner.backbone.episode_workers.messages import AgentJob
    from astuner.backbone.ray_cluster.connection import ray_connected
    from astuner.backbone.ray_cluster.environment import OWN_ENVIRONMENT, environment_set
    from astuner.backbone.trinity.coordinator import CoordinatorJob, start_coordinator
    from astuner.backbone.trinity.event_consumer import EventConsumer

    config = AstunerConfig(asynchrony={"stall_timeout": STALL})
    folder = str(Path(__file__).parents[3])
    job = CoordinatorJob(
        AgentJob(config, (), Path(), "model", active_breakpoints()),
        uses_tinker=True,
        max_model_len=64,
        updates=1,
        runners=1,
    )
    trinity_actors = SimpleNamespace(
        config=SimpleNamespace(log=SimpleNamespace(save_dir="logs")), check_alive=lambda **_: None
    )
    with (
        environment_set(OWN_ENVIRONMENT),
        ray_connected({"namespace": "event-consumer", "runtime_env": {"env_vars": {"PYTHONPATH": folder}}}),
    ):
        yield EventConsumer(config, start_coordinator(job), trinity_actors, last_trainer_step=4)


def run_a_batch(event_consumer: Any) -> None:
    request = BatchRequest((Task("t", "?"),), 1, "train", 1, 0, CallSettings())
    event_consumer.run(request, lambda _: None, lambda _: None)


def wait_for_an_update(event_consumer: Any) -> None:
    event_consumer.wait_for_update(1, 1)


def test_another_call_continues_a_wait_that_a_signal_interrupted(event_consumer: Any) -> None:
    import ray

    from astuner.backbone.trinity.coordinator import AdvantagesReady, BatchConsumed, EpisodeFinished, MetricsLogged

    def post(*events: Any) -> None:
        for event in events:
            ray.get(event_consumer.coordinator.post_event.remote(event))

    def interrupted(wait: Callable[[], object]) -> None:
        Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            wait()

    task = Task("t", "?")
    episode = Episode("e", task, 0, "ok", 1.0, True)
    request = BatchRequest((task,), 1, "train", 2, 0, CallSettings())
    ready = AdvantagesReady(2, ("e",), None, frozenset())
    post(EpisodeFinished("train", 2, episode))
    interrupted(lambda: event_consumer.run(request, lambda _: None, lambda _: None))
    post(ready, BatchConsumed(2, {("e", 0): "digest"}))
    # The caller may have been interrupted before it had the result.
    for _ in range(2):
        assert event_consumer.run(request, lambda _: None, lambda _: None) == [episode]
    interrupted(lambda: event_consumer.wait_for_update(2, 2))
    post(MetricsLogged("trainer", 2, {"loss": 1.0}))
    event_consumer.wait_for_update(2, 2)
    trained = event_consumer.take_update(2, range(2, 3))
    assert (trained.advantages, trained.digests, trained.metrics) == (ready, {("e", 0): "digest"}, [{"loss": 1.0}])
    assert event_consumer.backlog == 0


@pytest.mark.parametrize("wait", [run_a_batch, wait_for_an_update])
def test_stalled_run_is_an_error_even_if_episodes_write_logs(event_consumer: Any, wait: Callable[[Any], None]) -> None:
    import ray

    from astuner.backbone.episode_workers.messages import LogRecord

    stopped = Event()

    def log() -> None:
        while not stopped.wait(0.1):
            ray.get(event_consumer.coordinator.post_event.remote(LogRecord("DEBUG", "still here")))

    logging_thread = Thread(target=log)
    logging_thread.start()
    started = time.monotonic()
    try:
        with pytest.raises(BackboneError, match=r"for 2 s: .*stall_timeout is 2 s.*Run the same command again"):
            wait(event_consumer)
    finally:
        stopped.set()
        logging_thread.join()
    assert time.monotonic() - started >= STALL
