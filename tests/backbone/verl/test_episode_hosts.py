"""Loss and reports of episode hosts, on a Ray without verl's workers."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from loguru import logger
from omegaconf import OmegaConf

from astuner.debugging.breakpoints import active_breakpoints
from astuner.model_tuner.chat_options import CallSettings
from astuner.schema import Episode, Task
from astuner.task_rollout.active_episodes import ActiveEpisodes
from astuner.task_rollout.rollout import BatchRequest
from tests.backbone.verl.plans import run_config

if TYPE_CHECKING:
    from astuner.backbone.verl.episode_hosts import EpisodeHosts

pytestmark = pytest.mark.verl

CONFIG = {"ray_kwargs": {"ray_init": {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 80_000_000}}}
TASKS = [Task(name, "?") for name in ("first", "unlucky", "last")]
REQUEST = BatchRequest(TASKS, 2, "train", 1, 0, CallSettings())


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that all workers on a Ray share."""
    from astuner.backbone.verl.cluster import ray_running, verl_environment, verl_worker_server

    folder = tmp_path_factory.mktemp("shared")
    shared = {"SHARED_FOLDER": str(folder)}
    with (
        verl_environment("cpu", own_ray=True) as environment,
        verl_worker_server(environment | shared) as server,
        ray_running(OmegaConf.create(CONFIG), environment | shared, server),
    ):
        yield folder


@contextlib.contextmanager
def hosts_with(agent: str, model: Path, folder: Path) -> Iterator[EpisodeHosts]:
    """Start one host, with an agent of faulty_agents.py and without an engine."""
    from astuner.backbone.episode_workers.messages import AgentJob
    from astuner.backbone.verl.episode_hosts import EpisodeHosts
    from astuner.backbone.verl.rollout_engine import VerlEngine

    workflow = f"{Path(__file__).parent / 'faulty_agents.py'}->{agent}"
    config = run_config(
        model__renderer="qwen3", rollout__agentscope_workflow=workflow, rollout__max_env_worker=8
    ).astuner
    job = AgentJob(config, (), folder, str(model), active_breakpoints())
    hosts = EpisodeHosts(job, VerlEngine(None, 64), ActiveEpisodes())
    hosts.start()
    try:
        yield hosts
    finally:
        hosts.close()


@pytest.mark.parametrize(("step", "runs", "losses"), [(1, 1, 0), (2, 3, 3)], ids=["worker", "host"])
def test_only_the_episode_that_kills_a_process_is_lost(
    step: int, runs: int, losses: int, model_folder: Path, shared_folder: Path
):
    reported: list[Episode] = []
    warnings: list[str] = []
    sink = logger.add(lambda message: warnings.append(str(message)), level="WARNING")
    with hosts_with("KillsAProcess", model_folder, shared_folder) as hosts:
        episodes = hosts.run(replace(REQUEST, step=step), reported.append, lambda _: None)
    logger.remove(sink)
    kinds = {(episode.task.task_id, episode.repeat_index): episode.error_kind for episode in episodes}
    assert list(kinds) == [(task.task_id, repeat) for task in TASKS for repeat in range(2)]
    assert [pair for pair, kind in kinds.items() if kind == "worker"] == [("unlucky", 1)]
    assert sorted(episode.episode_id for episode in reported) == sorted(episode.episode_id for episode in episodes)
    # Finished episodes did not run again; one that ends its host ran three times, the last time alone.
    prefix = f"train-{step:06d}-"
    ran = Counter(path.name.rpartition(".")[0] for path in shared_folder.iterdir() if path.name.startswith(prefix))
    assert ran.pop(f"{prefix}unlucky-1") == runs
    assert set(ran.values()) == {1}
    assert sum("an episode host was lost" in warning for warning in warnings) == losses


def wait_for(path: Path) -> str:
    """Wait at most a minute for a non-empty file, and return its text."""
    until = time.monotonic() + 60
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < until
        time.sleep(0.05)
    return path.read_text()


def test_hosts_report_their_episodes_and_blocked_ones_are_named(model_folder: Path, shared_folder: Path):
    with (
        hosts_with("WaitsForAFile", model_folder, shared_folder) as hosts,
        ThreadPoolExecutor(1) as threads,
    ):
        assert not hosts.running
        everything = threads.submit(hosts.run, REQUEST, lambda _: None, lambda _: None)
        host = int(wait_for(shared_folder / "process"))
        time.sleep(1)  # until all episodes run
        assert hosts.running
        report = hosts.running.report()
        os.kill(host, signal.SIGSTOP)
        without_host = hosts.running.report()
        os.kill(host, signal.SIGCONT)
        (shared_folder / "continue").touch()
        assert len(everything.result(60)) == 6
        assert not hosts.running
    assert report.splitlines()[0] == "6 episodes running"
    assert "train-000001-unlucky-1: for " in report
    assert report.count("await asyncio.sleep(0.05)  # waits here") == 6
    assert without_host.splitlines()[0] == "0 episodes running"
    assert "episode host 1 did not answer within 5 s" in without_host
