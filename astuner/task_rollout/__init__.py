"""Batches of episodes."""

from astuner.schema import Split
from astuner.task_rollout.rollout import (
    BatchRequest,
    OnEpisode,
    TaskRollout,
    episode_seed,
    lost_episodes,
    report_failures,
)
from astuner.task_rollout.running import RunningEpisodes

__all__ = [
    "BatchRequest",
    "OnEpisode",
    "RunningEpisodes",
    "Split",
    "TaskRollout",
    "episode_seed",
    "lost_episodes",
    "report_failures",
]
