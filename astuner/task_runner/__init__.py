"""Running one episode: workflow, then judge."""

from astuner.task_runner.runner import TaskRunner, own_frame

__all__ = ["TaskRunner", "own_frame"]
