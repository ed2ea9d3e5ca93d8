"""Batches of episodes."""

from astuner.schema import Split
from astuner.task_rollout.rollout import BatchRequest, TaskRollout, episode_seed
from astuner.task_rollout.running import RunningEpisodes

__all__ = ["BatchRequest", "RunningEpisodes", "Split", "TaskRollout", "episode_seed"]
