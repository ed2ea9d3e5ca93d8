"""Running one episode: workflow, then judge."""

from astuner.task_runner.runner import TaskRunner

__all__ = ["TaskRunner"]
