"""Running one episode: workflow, then judge."""

from astuner.task_runner.last_call import last_call
from astuner.task_runner.runner import TaskRunner, own_frame

__all__ = ["TaskRunner", "last_call", "own_frame"]
