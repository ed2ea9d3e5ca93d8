"""Runs six episodes on an existing Ray cluster, without verl's workers, and prints what became of them.

The file is run by its path: `python episodes_on_a_cluster.py ADDRESS MODEL FOLDER`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from loguru import logger
from omegaconf import OmegaConf

from astuner.backbone.verl.cluster import ray_running, verl_environment
from astuner.config.loading import with_values
from astuner.config.root import RunConfig
from astuner.debugging.breakpoints import active_breakpoints
from astuner.model_tuner.chat_options import CallSettings
from astuner.schema import Task
from astuner.task_rollout.active_episodes import ActiveEpisodes
from astuner.task_rollout.rollout import BatchRequest

REQUEST = BatchRequest([Task(name, "?") for name in ("a", "b", "c")], 2, "train", 1, 0, CallSettings())


def main(address: str, model: str, folder: str) -> None:
    """Run them."""
    settings = {
        "astuner.backbone": "verl",
        "astuner.model.renderer": "qwen3",
        "astuner.rollout.agentscope_workflow": f"{Path(__file__).parent / 'faulty_agents.py'}->WaitsOnItsNode",
        "astuner.rollout.max_env_worker": 8,
    }
    ray_config = OmegaConf.create({"ray_kwargs": {"ray_init": {"address": address}}, "transfer_queue": {}})
    warnings: list[str] = []
    logger.add(lambda message: warnings.append(message.record["message"]), level="WARNING")
    with (
        verl_environment("cpu", own_ray=True) as environment,
        ray_running(ray_config, environment | {"SHARED_FOLDER": folder}),
    ):
        from astuner.backbone.episode_workers.messages import AgentJob
        from astuner.backbone.verl.episode_hosts import EpisodeHosts
        from astuner.backbone.verl.rollout_engine import VerlEngine

        config = with_values(RunConfig(), settings).astuner
        job = AgentJob(config, (), Path(folder), model, active_breakpoints())
        hosts = EpisodeHosts(job, VerlEngine(None, 64), ActiveEpisodes())
        hosts.start()
        reported: list[str] = []
        episodes = hosts.run(REQUEST, lambda episode: reported.append(episode.episode_id), lambda _: None)
        hosts.close()
    error_kinds = {episode.episode_id: episode.error_kind for episode in episodes}
    print(json.dumps({"error_kinds": error_kinds, "reported": reported, "warnings": warnings}))


if __name__ == "__main__":
    main(*sys.argv[1:])
