"""Episode workers that are lost, on a Ray without verl's workers."""

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

from astuner.breakpoints import chosen
from astuner.model_tuner import CallSettings
from astuner.schema import Episode, Task
from astuner.task_rollout import BatchRequest, RunningEpisodes
from tests.backbone.verl.plans import run_config

if TYPE_CHECKING:
    from astuner.backbone.verl.fleet import EpisodeFleet

pytestmark = pytest.mark.verl

CONFIG = {"ray_kwargs": {"ray_init": {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 80_000_000}}}
TASKS = [Task(name, "?") for name in ("first", "unlucky", "last")]
REQUEST = BatchRequest(TASKS, 2, "train", 1, 0, CallSettings())


@contextlib.contextmanager
def fleet_of(agent: str, model: Path, folder: Path) -> Iterator[EpisodeFleet]:
    """Start one worker, with an agent of accidents.py and without any engine."""
    from astuner.backbone.verl.client_engine import VerlEngine
    from astuner.backbone.verl.cluster import environment_prepared, ray_running
    from astuner.backbone.verl.episode_worker import WorkerJob
    from astuner.backbone.verl.fleet import EpisodeFleet

    workflow = f"{Path(__file__).parent / 'accidents.py'}->{agent}"
    config = run_config(
        model__renderer="qwen3", rollout__agentscope_workflow=workflow, rollout__max_env_worker=8
    ).astuner
    job = WorkerJob(config, (), folder, str(model), chosen(), VerlEngine(None, 64))
    with (
        environment_prepared("cpu", own=True) as environment,
        ray_running(OmegaConf.create(CONFIG), environment | {"ACCIDENTS": str(folder)}),
    ):
        fleet = EpisodeFleet(job, RunningEpisodes())
        fleet.start()
        try:
            yield fleet
        finally:
            fleet.close()


def test_only_the_episode_that_ends_its_process_is_lost(model_folder: Path, tmp_path: Path):
    told: list[Episode] = []
    warnings: list[str] = []
    sink = logger.add(lambda message: warnings.append(str(message)), level="WARNING")
    with fleet_of("Deadly", model_folder, tmp_path) as fleet:
        found = fleet.run(REQUEST, told.append, lambda _: None)
    logger.remove(sink)
    kinds = {(episode.task.task_id, episode.repeat_index): episode.error_kind for episode in found}
    assert list(kinds) == [(task.task_id, repeat) for task in TASKS for repeat in range(2)]
    assert [pair for pair, kind in kinds.items() if kind == "worker"] == [("unlucky", 1)]
    assert sorted(episode.episode_id for episode in told) == sorted(episode.episode_id for episode in found)
    # What had arrived was not run again; the guilty one had its chances, the last of them alone.
    ran = Counter(path.name.rpartition(".")[0] for path in tmp_path.iterdir() if path.name.startswith("train-"))
    assert ran.pop("train-000001-unlucky-1") == 3
    assert set(ran.values()) == {1}
    assert sum("an episode worker was lost" in warning for warning in warnings) == 3


def wait_for(path: Path) -> str:
    """Wait, for a minute at most, for a file with something in it."""
    until = time.monotonic() + 60
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < until
        time.sleep(0.05)
    return path.read_text()


def test_a_worker_says_what_its_episodes_are_at_or_is_named(model_folder: Path, tmp_path: Path):
    with fleet_of("WaitsForASign", model_folder, tmp_path) as fleet, ThreadPoolExecutor(1) as threads:
        assert not fleet.running
        everything = threads.submit(fleet.run, REQUEST, lambda _: None, lambda _: None)
        worker = int(wait_for(tmp_path / "process"))
        time.sleep(1)  # until the others run, too
        assert fleet.running
        said = fleet.running.report()
        os.kill(worker, signal.SIGSTOP)
        silent = fleet.running.report()
        os.kill(worker, signal.SIGCONT)
        (tmp_path / "sign").touch()
        assert len(everything.result(60)) == 6
        assert not fleet.running
    assert said.splitlines()[0] == "6 episodes running"
    assert "train-000001-unlucky-1: for " in said
    assert said.count("await asyncio.sleep(0.05)  # here it stands") == 6
    assert silent.splitlines()[0] == "0 episodes running"
    assert "episode worker 1 does not answer within 5 s" in silent
