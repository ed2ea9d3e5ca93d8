"""Loss and reports of episode workers, on a Ray without verl's workers."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from loguru import logger
from omegaconf import OmegaConf

from astuner.debugging.breakpoints import active_breakpoints
from astuner.model_tuner import CallSettings
from astuner.schema import Episode, Task
from astuner.task_rollout import ActiveEpisodes, BatchRequest
from tests.backbone.verl.plans import run_config

if TYPE_CHECKING:
    from astuner.backbone.verl.episode_worker_pool import EpisodeWorkerPool

pytestmark = pytest.mark.verl

CONFIG = {"ray_kwargs": {"ray_init": {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 80_000_000}}}
TASKS = [Task(name, "?") for name in ("first", "unlucky", "last")]
REQUEST = BatchRequest(TASKS, 2, "train", 1, 0, CallSettings())


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that all workers on a Ray share."""
    from astuner.backbone.verl.cluster import ray_running, verl_environment, verl_worker_server

    folder = tmp_path_factory.mktemp("shared")
    with (
        verl_environment("cpu", own_ray=True) as environment,
        verl_worker_server(environment) as server,
        ray_running(OmegaConf.create(CONFIG), environment | {"SHARED_FOLDER": str(folder)}, server),
    ):
        yield folder


@contextlib.contextmanager
def worker_pool_with(agent: str, model: Path, folder: Path) -> Iterator[EpisodeWorkerPool]:
    """Start one worker, with an agent of faulty_agents.py and without an engine."""
    from astuner.backbone.verl.episode_worker_pool import EpisodeWorkerPool, WorkerJob
    from astuner.backbone.verl.rollout_engine import VerlEngine

    workflow = f"{Path(__file__).parent / 'faulty_agents.py'}->{agent}"
    config = run_config(
        model__renderer="qwen3", rollout__agentscope_workflow=workflow, rollout__max_env_worker=8
    ).astuner
    job = WorkerJob(config, (), folder, str(model), active_breakpoints(), VerlEngine(None, 64))
    worker_pool = EpisodeWorkerPool(job, ActiveEpisodes())
    worker_pool.start()
    try:
        yield worker_pool
    finally:
        worker_pool.close()


def test_only_the_episode_that_kills_its_process_is_lost(model_folder: Path, shared_folder: Path):
    reported: list[Episode] = []
    warnings: list[str] = []
    sink = logger.add(lambda message: warnings.append(str(message)), level="WARNING")
    with worker_pool_with("KillsItsWorker", model_folder, shared_folder) as worker_pool:
        episodes = worker_pool.run(REQUEST, reported.append, lambda _: None)
    logger.remove(sink)
    kinds = {(episode.task.task_id, episode.repeat_index): episode.error_kind for episode in episodes}
    assert list(kinds) == [(task.task_id, repeat) for task in TASKS for repeat in range(2)]
    assert [pair for pair, kind in kinds.items() if kind == "worker"] == [("unlucky", 1)]
    assert sorted(episode.episode_id for episode in reported) == sorted(episode.episode_id for episode in episodes)
    # Finished episodes did not run again; the fatal one ran three times, the last time alone.
    ran = Counter(path.name.rpartition(".")[0] for path in shared_folder.iterdir() if path.name.startswith("train-"))
    assert ran.pop("train-000001-unlucky-1") == 3
    assert set(ran.values()) == {1}
    assert sum("an episode worker was lost" in warning for warning in warnings) == 3


def wait_for(path: Path) -> str:
    """Wait at most a minute for a non-empty file, and return its text."""
    until = time.monotonic() + 60
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < until
        time.sleep(0.05)
    return path.read_text()


def test_workers_report_their_episodes_and_blocked_ones_are_named(model_folder: Path, shared_folder: Path):
    with (
        worker_pool_with("WaitsForAFile", model_folder, shared_folder) as worker_pool,
        ThreadPoolExecutor(1) as threads,
    ):
        assert not worker_pool.running
        everything = threads.submit(worker_pool.run, REQUEST, lambda _: None, lambda _: None)
        worker = int(wait_for(shared_folder / "process"))
        time.sleep(1)  # until all episodes run
        assert worker_pool.running
        report = worker_pool.running.report()
        os.kill(worker, signal.SIGSTOP)
        without_worker = worker_pool.running.report()
        os.kill(worker, signal.SIGCONT)
        (shared_folder / "continue").touch()
        assert len(everything.result(60)) == 6
        assert not worker_pool.running
    assert report.splitlines()[0] == "6 episodes running"
    assert "train-000001-unlucky-1: for " in report
    assert report.count("await asyncio.sleep(0.05)  # waits here") == 6
    assert without_worker.splitlines()[0] == "0 episodes running"
    assert "episode worker 1 did not answer within 5 s" in without_worker
