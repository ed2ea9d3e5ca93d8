"""Runs batches of episodes and computes their statistics."""

from astuner.task_rollout.active_episodes import ActiveEpisodes, RunningReport, current_episode
from astuner.task_rollout.rollout import (
    BatchRequest,
    EpisodeExecutor,
    OnEpisode,
    TaskRollout,
    describe_failures,
    failed_episode,
    failed_episodes,
    report_failures,
)

__all__ = [
    "ActiveEpisodes",
    "BatchRequest",
    "EpisodeExecutor",
    "OnEpisode",
    "RunningReport",
    "TaskRollout",
    "current_episode",
    "describe_failures",
    "failed_episode",
    "failed_episodes",
    "report_failures",
]
