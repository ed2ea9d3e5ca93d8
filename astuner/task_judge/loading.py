"""Creation of a judge from its path and parameters."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from astuner.errors import PluginError, did_you_mean
from astuner.plugin import load_class, raised_at
from astuner.task_judge.judge_base import BaseJudge

if TYPE_CHECKING:
    from astuner.config.data import TaskJudgeConfig


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
        params: the parameters of the class.
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
    """Check the parameters against the signature of the class.

    Raises:
        PluginError: a parameter is unknown or missing.
    """
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
