"""Episode workers that are lost, on a Ray without verl's workers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from loguru import logger
from omegaconf import OmegaConf

from astuner.breakpoints import chosen
from astuner.model_tuner import CallSettings
from astuner.schema import Episode, Task
from astuner.task_rollout import BatchRequest, RunningEpisodes
from tests.backbone.verl.plans import run_config

pytestmark = pytest.mark.verl

CONFIG = {"ray_kwargs": {"ray_init": {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 80_000_000}}}
AGENT = f"{Path(__file__).parent / 'accidents.py'}->Deadly"


def test_only_the_episode_that_ends_its_process_is_lost(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from astuner.backbone.verl.client_engine import VerlEngine
    from astuner.backbone.verl.cluster import environment_prepared, ray_running
    from astuner.backbone.verl.episode_worker import WorkerJob
    from astuner.backbone.verl.fleet import EpisodeFleet

    monkeypatch.setenv("ACCIDENTS", str(tmp_path))
    config = run_config(model__renderer="qwen3", rollout__agentscope_workflow=AGENT, rollout__max_env_worker=8).astuner
    job = WorkerJob(config, (), tmp_path, str(model_folder), chosen(), VerlEngine(None, 64))
    tasks = [Task(name, "?") for name in ("first", "unlucky", "last")]
    request = BatchRequest(tasks, 2, "train", 1, 0, CallSettings())
    told: list[Episode] = []
    warnings: list[str] = []
    sink = logger.add(lambda message: warnings.append(str(message)), level="WARNING")
    with (
        environment_prepared("cpu", own=True) as environment,
        ray_running(OmegaConf.create(CONFIG), environment | {"ACCIDENTS": str(tmp_path)}),
    ):
        fleet = EpisodeFleet(job, RunningEpisodes())
        fleet.start()
        try:
            found = fleet.run(request, told.append, lambda _: None)
        finally:
            fleet.close()
            logger.remove(sink)
    kinds = {(episode.task.task_id, episode.repeat_index): episode.error_kind for episode in found}
    assert list(kinds) == [(task.task_id, repeat) for task in tasks for repeat in range(2)]
    assert [pair for pair, kind in kinds.items() if kind == "worker"] == [("unlucky", 1)]
    assert sorted(episode.episode_id for episode in told) == sorted(episode.episode_id for episode in found)
    # What had arrived was not run again; the guilty one had its chances, the last of them alone.
    ran = Counter(path.name.rpartition(".")[0] for path in tmp_path.iterdir() if path.name.startswith("train-"))
    assert ran.pop("train-000001-unlucky-1") == 3
    assert set(ran.values()) == {1}
    assert sum("an episode worker was lost" in warning for warning in warnings) == 3
