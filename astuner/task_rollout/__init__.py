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
from astuner.task_rollout.running import RunningEpisodes, RunningReport, current_episode

__all__ = [
    "BatchRequest",
    "OnEpisode",
    "RunningEpisodes",
    "RunningReport",
    "Split",
    "TaskRollout",
    "current_episode",
    "episode_seed",
    "lost_episodes",
    "report_failures",
]
