"""The rollout of a run whose engine belongs to its process."""

from __future__ import annotations

from dataclasses import replace

from loguru import logger

from astuner.backbone.training.run_inputs import RunInputs, runs_inline
from astuner.config.root import AstunerConfig
from astuner.doors import through_door
from astuner.llm_engine.protocol import LlmEngine
from astuner.task_rollout import ActiveEpisodes, TaskRollout


def make_rollout(
    config: AstunerConfig, run_inputs: RunInputs, engine: LlmEngine, active_episodes: ActiveEpisodes
) -> TaskRollout:
    """Return the rollout of a run whose engine belongs to this process, in threads or in processes.

    Args:
        config: the resolved configuration.
        run_inputs: the agent and its model.
        engine: the model.
        active_episodes: registers the running episodes.
    """
    rollout = run_inputs.rollout(config, engine, active_episodes)
    if config.rollout.isolation == "thread":
        return rollout
    if runs_inline(config):
        logger.warning(
            "--db: episodes run one at a time in the main thread, where breakpoints stop the whole run; "
            "rollout.isolation: process has no effect"
        )
        return rollout
    processes = through_door("episodes", "processes")(config, run_inputs, engine, rollout.workers)
    return replace(rollout, processes=processes)
