"""Runs batches of episodes and computes their statistics."""

from astuner.schema import Split
from astuner.task_rollout.active_episodes import ActiveEpisodes, RunningReport, current_episode
from astuner.task_rollout.failure_groups import describe_failures
from astuner.task_rollout.rollout import (
    BatchRequest,
    OnEpisode,
    TaskRollout,
    WorkerProcesses,
    episode_seed,
    failed_episode,
    failed_episodes,
    report_failures,
)

__all__ = [
    "ActiveEpisodes",
    "BatchRequest",
    "OnEpisode",
    "RunningReport",
    "Split",
    "TaskRollout",
    "WorkerProcesses",
    "current_episode",
    "describe_failures",
    "episode_seed",
    "failed_episode",
    "failed_episodes",
    "report_failures",
]
