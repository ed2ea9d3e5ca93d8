"""Runs one episode: workflow, then judge."""

from astuner.task_runner.groups import judge_group
from astuner.task_runner.runner import TaskRunner, describe_calls

__all__ = ["TaskRunner", "describe_calls", "judge_group"]
