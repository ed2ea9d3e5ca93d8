"""Batches of episodes."""

from astuner.task_rollout.rollout import (
    BatchRequest,
    OnEpisode,
    Split,
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
