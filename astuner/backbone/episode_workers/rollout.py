"""The rollout of a run whose engine belongs to its process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from loguru import logger

from astuner.backbone.training.episode_placement import parallel_episodes, runs_inline, uses_workers
from astuner.backbone.training.run_inputs import RunInputs
from astuner.config.root import AstunerConfig
from astuner.doors import through_door
from astuner.llm_engine.protocol import LlmEngine
from astuner.task_rollout import ActiveEpisodes, TaskRollout


@contextlib.contextmanager
def with_workers(config: AstunerConfig, run_inputs: RunInputs) -> Iterator[RunInputs]:
    """Yield the inputs of a run with its worker processes, the first of which has loaded the agent.

    A run without worker processes has none: its episodes run in this process, or in those of Ray.

    Args:
        config: the resolved configuration.
        run_inputs: the agent and its model.

    Raises:
        AstunerError: the agent cannot be loaded.
    """
    if config.rollout.isolation == "process" and runs_inline(config):
        logger.warning(
            "--db: episodes run one at a time in the main thread, where breakpoints stop the whole run; "
            "rollout.isolation: process has no effect"
        )
    if not uses_workers(config) or run_inputs.workers is not None:
        yield run_inputs
        return
    with through_door("episodes", "processes")(config, run_inputs) as workers:
        yield replace(run_inputs, workers=workers)


def make_rollout(
    config: AstunerConfig, run_inputs: RunInputs, engine: LlmEngine, active_episodes: ActiveEpisodes
) -> TaskRollout:
    """Return the rollout of a run whose engine belongs to this process.

    Args:
        config: the resolved configuration.
        run_inputs: the agent and its model, from `with_workers`.
        engine: the model.
        active_episodes: registers the running episodes.
    """
    workers = run_inputs.workers
    if workers is None:
        return run_inputs.rollout(config, engine, active_episodes)
    workers.engine = engine
    return TaskRollout(
        None,
        workers=parallel_episodes(config),
        max_retries=config.rollout.max_retries,
        running=active_episodes,
        processes=workers,
    )
