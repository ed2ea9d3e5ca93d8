"""Where the episodes of a run are: in its main thread, in threads, in worker processes, or in processes of Ray."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from astuner.config.root import AstunerConfig
from astuner.debugging.breakpoints import has_breakpoints
from astuner.plugin import imported_packages
from astuner.task_judge.loading import judge_paths


def has_agent(config: AstunerConfig) -> bool:
    """Return whether an agent is configured."""
    rollout = config.rollout
    return (
        bool(rollout.agentscope_workflow) or config.workflow.command is not None or not rollout.use_agentscope_protocol
    )


def runs_inline(config: AstunerConfig) -> bool:
    """Return whether episodes run one at a time in the main thread, so that a debugger stops the whole run."""
    is_one = config.debug.debug_max_parallel == 1 and config.rollout.isolation == "thread"
    return config.backbone == "debug" and (has_breakpoints() or is_one)


def uses_workers(config: AstunerConfig) -> bool:
    """Return whether worker processes of the main process run the episodes."""
    if config.rollout.isolation == "thread" or config.trainer_common.algorithm.adv_estimator == "sft":
        return False
    return config.backbone in ("debug", "local") and not runs_inline(config)


def parallel_episodes(config: AstunerConfig) -> int:
    """Return the maximum number of concurrent episodes."""
    return config.debug.debug_max_parallel if config.backbone == "debug" else config.rollout.max_env_worker


def preloaded(config: AstunerConfig, search: Sequence[Path]) -> list[str]:
    """Return the installed modules that the files of the workflow and the judge import."""
    paths = [config.rollout.agentscope_workflow or "", *judge_paths(config.task_judge)]
    return list(dict.fromkeys(name for path in paths for name in imported_packages(path, search)))
