"""The base class of environments, and their import by name."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from astuner.errors import EnvError, PluginError, describe_error, short_repr
from astuner.plugin import load_class
from astuner.schema import Action, Evaluation, Observation, Reference, StepResult, TaskProfile

ADAPTERS = {
    "appworld": "astuner.env_service.adapters.appworld",
    "gymnasium": "astuner.env_service.adapters.gymnasium",
    "harbor": "astuner.env_service.adapters.harbor",
    "mcp": "astuner.env_service.adapters.mcp",
    "minigrid": "astuner.env_service.adapters.minigrid",
    "reasoning_gym": "astuner.env_service.adapters.reasoning_gym",
    "openenv": "astuner.env_service.adapters.openenv",
    "textarena": "astuner.env_service.adapters.textarena",
    "verifiers": "astuner.env_service.adapters.verifiers",
}
"""The module for each family of environments, which defines `create(name, **params)`.

It also defines `names()`, unless users name the environments, and may define `faults()`: why each of its other
environments cannot be used, by name.
"""


class Environment(ABC):
    """Base class of environments. An object lists the tasks, and plays at most one of them.

    The service creates one object for the task lists, and one for each instance. It calls `reset`, then `step` and
    `evaluate` any number of times, and `close` at the end, all in one thread. `reset`, `step`, `evaluate` and `close`
    may be `async`.

    Attributes:
        is_async: whether instances share the event loop of one process. Otherwise, each has its own process.
        tools: the tools of the environment, as OpenAI function schemas.
        action_preference: the form of actions that the agent prefers. The service sets it before it calls a method.
    """

    is_async: ClassVar[bool] = False
    tools: Sequence[Mapping[str, Any]] = ()
    action_preference: Literal["code", "text", "box"] = "text"

    def splits(self) -> Sequence[str]:
        """Return the names of the splits. No task is in two of them."""
        return ("train", "validation")

    @abstractmethod
    def task_ids(self, split: str) -> Sequence[str]:
        """Return a split's task ids, in a fixed order."""

    @abstractmethod
    def profile(self, split: str, task_id: str) -> TaskProfile:
        """Return the description of a task."""

    def reference(self, split: str, task_id: str) -> Reference | None:
        """Return a solution of a task. By default, it is the profile's reference; override it if a search finds it."""
        return self.profile(split, task_id).reference

    @abstractmethod
    def reset(self, split: str, task_id: str, seed: int) -> Observation:
        """Start a task.

        Args:
            seed: of the randomness in the task's course. Equal seeds give equal observations.

        Returns:
            The first observation. The agent sees it after `TaskProfile.main_query`.
        """

    @abstractmethod
    def step(self, action: Action) -> StepResult:
        """Perform an action. One that the environment does not understand gives a result with `is_valid=False`."""

    @abstractmethod
    def evaluate(self) -> Evaluation:
        """Return the score so far."""

    def close(self) -> None:
        """Release the resources of the instance."""
        return


def tool_schema(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool as an OpenAI function schema; `parameters` is the JSON schema of its arguments."""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def load_environment(
    env_type: str, params: Mapping[str, Any] | None = None, *, search: Sequence[Path] = ()
) -> Environment:
    """Return an environment by its name.

    Args:
        env_type: `family/name`, for example `gymnasium/FrozenLake-v1`, or `package.module->Class`.
        params: the keyword arguments of the environment.
        search: the folders in which to search for `package.module->Class`.

    Raises:
        EnvError: there is no such environment, its package is not installed, or it rejects the parameters.
        PluginError: `package.module->Class` cannot be loaded.
    """
    if "->" in env_type:
        create = load_class(env_type, Environment, search=search)  # type: ignore[type-abstract]
        return _created(env_type, create, params or {})
    family, _, name = env_type.partition("/")
    if family not in ADAPTERS or not name:
        raise EnvError(
            f"there is no environment {short_repr(env_type)}; expected FAMILY/NAME with one of the families "
            f"{', '.join(ADAPTERS)} (`astuner env list` shows the names), or `package.module->Class`"
        )
    return _created(env_type, lambda **params: adapter(family).create(name, **params), params or {})


def adapter(family: str) -> Any:
    """Return the module for an environment family.

    Raises:
        EnvError: its package is not installed.
    """
    try:
        return importlib.import_module(ADAPTERS[family])
    except ModuleNotFoundError as error:
        extra = family.replace("_", "-")
        raise EnvError(
            f"the environments {family}/... need package {error.name}, which is not installed: "
            f"pip install 'astuner[{extra}]'"
        ) from error


def _created(env_type: str, create: Any, params: Mapping[str, Any]) -> Environment:
    try:
        environment: Environment = create(**params)
    except (EnvError, PluginError):
        raise
    except Exception as error:
        given = f" with the parameters {short_repr(dict(params))}" if params else ""
        raise EnvError(f"environment {env_type} could not be created{given}: {describe_error(error)}") from error
    return environment
