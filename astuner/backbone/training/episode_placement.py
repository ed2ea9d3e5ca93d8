"""Where a run's episodes are: in its main thread, its worker processes, or those of Ray's actors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from astuner.config.root import AstunerConfig
from astuner.debugging.breakpoints import is_debugged
from astuner.errors import ConfigError
from astuner.plugin import imported_packages
from astuner.task_judge.judge_base import judge_paths


def has_agent(config: AstunerConfig) -> bool:
    """Return whether an agent is configured."""
    rollout = config.rollout
    return (
        bool(rollout.agentscope_workflow) or config.workflow.command is not None or not rollout.use_agentscope_protocol
    )


def check_agent_named(config: AstunerConfig) -> None:
    """Raise ConfigError if no agent is configured. Supervised training needs none."""
    if not has_agent(config) and not config.is_supervised:
        raise ConfigError(
            "rollout.agentscope_workflow is not set; set it to the agent, `package.module->Name`, or set "
            "workflow.command to the command line of a program, or rollout.use_agentscope_protocol to False"
        )


def runs_inline(config: AstunerConfig) -> bool:
    """Return whether episodes run one at a time in the main thread, so that a debugger stops the whole run."""
    if config.backbone == "debug" and config.debug.debug_max_parallel == 1:
        return True
    return config.backbone in ("debug", "local") and is_debugged()


def uses_workers(config: AstunerConfig) -> bool:
    """Return whether worker processes of the main process run the episodes."""
    return config.backbone in ("debug", "local") and not config.is_supervised and not runs_inline(config)


def preloaded(config: AstunerConfig, search: Sequence[Path]) -> list[str]:
    """Return what the files of the workflow and the judge import from installed packages (see `imported_packages`)."""
    paths = [config.rollout.agentscope_workflow or "", *judge_paths(config.task_judge)]
    return list(dict.fromkeys(name for path in paths for name in imported_packages(path, search)))
