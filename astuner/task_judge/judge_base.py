"""The base classes of judges, their creation from a path, and the values that they read from metadata."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from astuner.errors import JudgeError, PluginError, did_you_mean, shorten
from astuner.plugin import load_class, raised_at
from astuner.schema import Judgement, WorkflowOutput, WorkflowTask

if TYPE_CHECKING:
    from astuner.config.data import TaskJudgeConfig

Score = float | Mapping[str, float]
"""The reward of an episode, or its agents' rewards by name."""
_OUTPUT = "the workflow's output metadata"


class BaseJudge(ABC):
    """Base class of judges; subclasses implement `compute_reward`.

    A run has one judge, which scores many episodes concurrently: a synchronous `compute_reward` is called from several
    threads; an `async` one runs on the event loop and must not block it.

    `task_judge.params` sets the further parameters of a subclass: `def __init__(self, config, *, pattern: str)`.
    """

    def __init__(self, config: TaskJudgeConfig) -> None:
        self.config = config

    @classmethod
    def from_params(cls, config: TaskJudgeConfig, params: Mapping[str, Any], search: Sequence[Path] = ()) -> Self:
        """Create the judge from `task_judge.params`; a judge that contains other judges overrides this.

        Args:
            config: the section `task_judge`.
            params: the keyword arguments of the constructor.
            search: folders that are searched for the user's code.
        """
        return cls(config, **params)

    @abstractmethod
    def compute_reward(
        self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput
    ) -> tuple[Score, bool] | Judgement | Awaitable[tuple[Score, bool] | Judgement]:
        """Score one episode; may be a synchronous or an `async` method.

        Args:
            workflow_task: the task; for example `workflow_task.task.metadata["answer"]`.
            workflow_output: the output of the workflow; for example `workflow_output.metadata["final_answer"]`.
                `workflow_output.calls` are the LLM calls of the episode.

        Returns:
            The reward, a finite number or the rewards of the agents by name, and whether the task was solved; or a
            `Judgement`, which can also have components, an explanation, or no reward.

        Raises:
            UnscoredError: the episode cannot be scored, for example because a grading service does not answer.
        """

    def close(self) -> None:
        """Release what the judge holds, such as connections. Called once, at the end of the run."""
        return


class BaseGroupJudge(BaseJudge):
    """Base class for judges that score all of a task's episodes together, for example by ranking them.

    `compute_group_rewards` is called when the last of the task's `rollout.num_repeat` episodes has ended. Episodes that
    failed, or whose workflow returned a reward, are left out. If a single episode is left, as in greedy validation,
    `compute_reward` is called for it.
    """

    @abstractmethod
    def compute_group_rewards(
        self, workflow_task: WorkflowTask, workflow_outputs: Sequence[WorkflowOutput]
    ) -> Sequence[tuple[Score, bool] | Judgement] | Awaitable[Sequence[tuple[Score, bool] | Judgement]]:
        """Score the episodes of one task; may be a synchronous or an `async` method.

        Args:
            workflow_task: the task, as given to the first of the episodes; its environment has ended.
            workflow_outputs: the outputs of at least two episodes, whose metadata are JSON values.

        Returns:
            The results of the episodes, in the same order, each as from `compute_reward`.

        Raises:
            UnscoredError: the episodes cannot be scored.
        """


def answer_text(workflow_output: WorkflowOutput, key: str, judge: str) -> str:
    """Return the agent's answer, which is `key` in the metadata of the workflow's output; None is an empty text.

    Raises:
        JudgeError: there is no such key, or its value is neither a text nor a number.
    """
    return as_text(field_value(workflow_output.metadata, key, _OUTPUT, judge), key, _OUTPUT)


def task_value(workflow_task: WorkflowTask, key: str, judge: str) -> Any:
    """Return `key` in the metadata of a task.

    Raises:
        JudgeError: there is no such key.
    """
    return field_value(workflow_task.task.metadata, key, of_task(workflow_task), judge)


def of_task(workflow_task: WorkflowTask) -> str:
    """Return the name of a task's metadata for messages."""
    return f"the metadata of task {shorten(workflow_task.task_id)}"


def field_value(metadata: Mapping[str, Any], key: str, owner: str, judge: str) -> Any:
    """Return the value under `key`.

    Raises:
        JudgeError: there is no such key.
    """
    if key not in metadata:
        keys = shorten(", ".join(sorted(map(str, metadata))), 1000) or "none"
        raise JudgeError(f"{owner} has no {key!r}, which {judge} needs. Its keys: {keys}.")
    value = metadata[key]
    return value.item() if getattr(value, "shape", None) == () else value  # numpy scalars


def as_text(value: object, key: str, owner: str) -> str:
    """Return a text or a number as text; None becomes an empty text.

    Raises:
        JudgeError: the value is neither.
    """
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise JudgeError(f"{key!r} in {owner} is of type {type(value).__name__}; expected a string or a number.")
    return str(value)


def make_judge(
    path: str,
    config: TaskJudgeConfig,
    params: Mapping[str, Any],
    search: Sequence[Path] = (),
    *,
    setting: str = "task_judge",
) -> BaseJudge:
    """Create the judge of class `path`.

    Args:
        path: `package.module->Class`.
        config: the section `task_judge`.
        search: folders that are searched for the class.
        setting: the name of the configuration section, for messages.

    Raises:
        PluginError: the class cannot be loaded or created, or has no such parameter.
    """
    judge_class = load_class(path, BaseJudge, search=search)  # type: ignore[type-abstract]
    _check_params(path, judge_class, params, setting)
    try:
        return judge_class.from_params(config, params, search)
    except PluginError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"{setting}.judge_protocol `{path}` could not be created from its configuration section: "
            f"{type(error).__name__}: {error} (at {raised_at(error)})"
        ) from error


def judge_paths(config: TaskJudgeConfig) -> list[str]:
    """Return the paths of the configured judge and the judges in its parameters."""
    nested: list[object] = [config.params]
    paths = [] if config.judge_protocol is None else [config.judge_protocol]
    for value in nested:  # the loop appends to the list
        if isinstance(value, Mapping):
            nested += value.values()
            path = value.get("judge_protocol")
            paths += [path] if isinstance(path, str) else []
    return paths


def _check_params(path: str, judge_class: type[BaseJudge], params: Mapping[str, Any], setting: str) -> None:
    parameters = list(inspect.signature(judge_class).parameters.values())[1:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    accepted = f"it has {', '.join(named)}" if named else "it has none"
    for name in params:
        if name not in named:
            hint = did_you_mean(name, named, " Did you mean {}?", show=str)
            raise PluginError(f"{setting}.params: `{path}` has no parameter {str(name)!r}; {accepted}.{hint}")
    missing = [name for name, p in named.items() if p.default is p.empty and name not in params]
    if missing:
        raise PluginError(f"{setting}.params: `{path}` needs {', '.join(missing)}; {accepted}.")
