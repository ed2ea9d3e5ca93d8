"""The base class of workflows, and workflows that are plain async functions."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from astuner.errors import PluginError, WorkflowError, short_repr
from astuner.plugin import describe, load_object, subclass_at
from astuner.schema import WorkflowOutput, WorkflowTask

if TYPE_CHECKING:
    from astuner.model_tuner.tuner import ModelTuner


class Workflow(ABC):
    """Base class of the agent programs to tune; subclasses implement `execute`.

    Each episode has its own instance, so attributes of `self` can hold the episode's state.

    Attributes:
        name: a name of the workflow.
        episode_metadata: metadata of the episode in addition to that of its output; recorded also if `execute` raises.
    """

    name: str = ""
    episode_metadata: Mapping[str, Any] = MappingProxyType({})

    @abstractmethod
    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        """Run one episode.

        Args:
            workflow_task: the task and the identity of the episode.
            model_tuner: the model in training; pass it to the agent as its model.

        Returns:
            The output. The configured judge is called only if `reward` is None.
        """


class FunctionWorkflow(Workflow):
    """A workflow that is an async function of a task and the model, `async def run(task, model_tuner)`."""

    def __init__(self, function: Callable[[WorkflowTask, ModelTuner], Awaitable[Any]]) -> None:
        """Wrap a function that returns a reward or a `WorkflowOutput`."""
        self._function = function

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        """Run one episode; `WorkflowError` if the function returned neither a finite number nor a `WorkflowOutput`."""
        returned: object = self._function(workflow_task, model_tuner)
        if not isinstance(returned, Awaitable):
            name = _name(self._function)
            raise WorkflowError(
                f"{name} returned {type(returned).__name__}, not an awaitable; write `async def {name}`"
            )
        result = await returned
        if isinstance(result, WorkflowOutput):
            return result
        if hasattr(result, "__float__") and not inspect.isawaitable(result):
            return WorkflowOutput(reward=result)
        raise wrong_output(_name(self._function), "a reward (a number) or a WorkflowOutput", result)


def wrong_output(function: str, expected: str, output: object) -> WorkflowError:
    """Return the error for a workflow that returned something other than `expected`."""
    if not inspect.isawaitable(output):
        return WorkflowError(f"{function} must return {expected}, got {type(output).__name__}: {short_repr(output)}")
    if inspect.iscoroutine(output):
        output.close()
    return WorkflowError(
        f"{function} must return {expected}, got a {type(output).__name__} that was not awaited "
        f"({getattr(output, '__qualname__', type(output).__name__)}); write `await` in front of the call"
    )


def load_workflow(path: str, *, search: Sequence[Path] = ()) -> Callable[[], Workflow]:
    """Return a function that creates an episode's workflow from a path, as for `load_class`.

    The path names a `Workflow` class or an async function.

    Raises:
        PluginError: the path cannot be loaded, or names something else.
    """
    return workflow_factory(path, load_object(path, search=search))


def workflow_factory(path: str, value: object) -> Callable[[], Workflow]:
    """Return a function that creates the workflow of an episode from `value`, the object at `path`.

    Raises:
        PluginError: it is neither a `Workflow` class nor an async function of a task and the model.
    """
    if isinstance(value, type):
        return subclass_at(path, value, Workflow)  # type: ignore[type-abstract]
    if not callable(value):
        raise PluginError(
            f"`{path}` is {describe(value)}; expected a class that derives from {Workflow.__module__}.Workflow, "
            f"or a function `{_SIGNATURE}`."
        )
    function = inspect.unwrap(value)
    call = function if inspect.isroutine(function) or isinstance(function, partial) else type(function).__call__
    if inspect.isasyncgenfunction(call):
        raise PluginError(f"`{path}` contains `yield`; an async function that returns the reward is expected.")
    if not inspect.iscoroutinefunction(call):
        raise PluginError(f"`{path}` is a function without `async`; write `{_SIGNATURE.replace('run', _name(value))}`.")
    try:
        inspect.signature(value).bind(None, None)
    except TypeError:
        raise PluginError(
            f"`{path}` has the parameters {inspect.signature(value)}; it is called with two, the task and the model. "
            f"Write `{_SIGNATURE.replace('run', _name(value))}`."
        ) from None
    return partial(FunctionWorkflow, value)


_SIGNATURE = "async def run(task, model_tuner)"


def _name(function: object) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
