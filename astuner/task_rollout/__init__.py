"""Batches of episodes."""

from astuner.task_rollout.rollout import BatchRequest, Split, TaskRollout, episode_seed
from astuner.task_rollout.running import RunningEpisodes

__all__ = ["BatchRequest", "RunningEpisodes", "Split", "TaskRollout", "episode_seed"]
