"""Loss of the process that runs the episodes of a runner, without Trinity's explorer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from astuner.debugging.breakpoints import active_breakpoints
from astuner.errors import AstunerError
from astuner.model_tuner.chat_options import CallSettings
from astuner.schema import Task
from astuner.task_rollout.rollout import BatchRequest
from tests.backbone.trinity.plans import run_config

pytestmark = pytest.mark.trinity

AGENTS = Path(__file__).parents[1] / "verl" / "faulty_agents.py"
TASKS = [Task(name, "?") for name in ("first", "unlucky", "last")]
REQUEST = BatchRequest(TASKS, 2, "train", 1, 0, CallSettings())


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Start Ray; return the folder SHARED_FOLDER of its processes."""
    from astuner.backbone.ray_cluster.connection import ray_connected
    from astuner.backbone.ray_cluster.environment import OWN_ENVIRONMENT, environment_set
    from astuner.backbone.ray_cluster.worker_server import worker_server

    folder = tmp_path_factory.mktemp("shared")
    variables = {"PYTHONPATH": str(Path(__file__).parents[3]), "SHARED_FOLDER": str(folder)}
    with (
        environment_set(OWN_ENVIRONMENT),
        worker_server(("astuner.backbone.episode_workers.process", "torch", "transformers"), variables) as server,
        ray_connected(
            {
                "namespace": "episode-runner",
                "runtime_env": {"env_vars": variables, "py_executable": server.executable},
            }
        ),
    ):
        yield folder


def run_episodes(agent: str, model: Path, folder: Path, step: int = 1) -> tuple[list[Any], list[Any]]:
    """Run the batch; return the episodes with a reward, and the events that the launcher receives."""
    import ray

    from astuner.backbone.episode_workers.messages import AgentJob
    from astuner.backbone.trinity.coordinator import CoordinatorJob, EpisodesStarted, start_coordinator
    from astuner.backbone.trinity.engines import RolloutWeights
    from astuner.backbone.trinity.episode_runner import EpisodeRunner

    workflow = f"{AGENTS}->{agent}"
    config = run_config(
        model__renderer="qwen3", rollout__agentscope_workflow=workflow, rollout__max_env_worker=8
    ).astuner
    agent_job = AgentJob(config, (), folder, str(model), active_breakpoints())
    job = CoordinatorJob(agent_job, uses_tinker=False, max_model_len=64, updates=1, runners=1)
    handle = start_coordinator(job)
    try:
        runner = EpisodeRunner(ray.get(handle.job.remote()))
        weights = RolloutWeights(0, "model", "http://127.0.0.1:9/v1", "model")
        usable = runner.run(replace(REQUEST, step=step), weights, EpisodesStarted("this process", None))
        return usable, list(ray.get(handle.read_events.remote(5.0)))
    finally:
        ray.kill(handle)


@pytest.mark.parametrize(("step", "runs", "losses"), [(1, 1, 0), (2, 3, 3)], ids=["worker", "host"])
def test_only_the_episode_that_kills_a_process_is_lost(
    step: int, runs: int, losses: int, shared: Path, model_folder: Path, tmp_path: Path
):
    from astuner.backbone.episode_workers.messages import LogRecord
    from astuner.backbone.trinity.coordinator import EpisodeFinished, EpisodesStarted, ShareFinished

    usable, events = run_episodes("KillsAProcess", model_folder, tmp_path, step)
    assert usable == []
    finished = [event.episode for event in events if isinstance(event, EpisodeFinished)]
    kinds = {(episode.task.task_id, episode.repeat_index): episode.error_kind for episode in finished}
    assert sorted(kinds) == sorted((task.task_id, repeat) for task in TASKS for repeat in range(2))
    assert len(finished) == 6
    assert [pair for pair, kind in kinds.items() if kind == "worker"] == [("unlucky", 1)]
    # Finished episodes did not run again; one that ends its host ran three times, the last time alone.
    prefix = f"train-{step:06d}-"
    ran = Counter(path.name.rpartition(".")[0] for path in shared.iterdir() if path.name.startswith(prefix))
    assert ran.pop(f"{prefix}unlucky-1") == runs
    assert set(ran.values()) == {1}
    # Each loss is logged, and resets the launcher's timeout.
    logged = [event.text for event in events if isinstance(event, LogRecord)]
    assert sum("an episode host was lost in train step 2" in text for text in logged) == losses
    assert sum(isinstance(event, EpisodesStarted) for event in events) == losses
    assert events[-1] == ShareFinished("train", step, 6, [])


def test_an_agent_that_cannot_be_loaded_is_an_error(shared: Path, model_folder: Path, tmp_path: Path):
    with pytest.raises(AstunerError, match="NoSuchAgent"):
        run_episodes("NoSuchAgent", model_folder, tmp_path)
