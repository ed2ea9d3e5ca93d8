"""Batches of episodes."""

from astuner.task_rollout.rollout import BatchRequest, Split, TaskRollout, episode_seed

__all__ = ["BatchRequest", "Split", "TaskRollout", "episode_seed"]
