"""Runs one episode: workflow, then judge."""

from astuner.task_runner.groups import is_unjudged, judge_group
from astuner.task_runner.runner import TaskRunner, describe_calls, error_location, innermost_user_frame

__all__ = ["TaskRunner", "describe_calls", "error_location", "innermost_user_frame", "is_unjudged", "judge_group"]
