"""The rollout of a run whose engine belongs to its process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from astuner.backbone.training.episode_placement import uses_workers
from astuner.backbone.training.run_inputs import RunInputs
from astuner.config.root import AstunerConfig
from astuner.doors import through_door
from astuner.llm_engine.protocol import LlmEngine
from astuner.task_rollout.active_episodes import ActiveEpisodes
from astuner.task_rollout.rollout import TaskRollout


@contextlib.contextmanager
def with_episodes(config: AstunerConfig, run_inputs: RunInputs) -> Iterator[RunInputs]:
    """Yield the inputs of a run with what runs its episodes: worker processes, or this process for a debugger.

    The agent has been loaded by then, in this process or in the first worker. Where Ray starts the processes later, one
    process loads the agent before the block, as a check.

    Raises:
        AstunerError: the agent cannot be loaded.
    """
    if config.is_supervised or run_inputs.episodes is not None:
        yield run_inputs
        return
    job = through_door("episodes", "job").of(config, run_inputs)
    start = through_door("episodes", "processes")
    if uses_workers(config):
        parallel = config.debug.debug_max_parallel if config.backbone == "debug" else config.rollout.max_env_worker
        with start(job, parallel, run_inputs.codec) as workers:
            yield replace(run_inputs, episodes=workers)
    elif config.backbone in ("verl", "trinity"):
        with start(job, 1, run_inputs.codec):
            pass
        yield run_inputs
    else:
        yield replace(run_inputs, episodes=through_door("episodes", "here")(job, run_inputs.codec))


def make_rollout(
    config: AstunerConfig, run_inputs: RunInputs, engine: LlmEngine, active_episodes: ActiveEpisodes
) -> TaskRollout:
    """Return the rollout of a run whose engine belongs to this process."""
    assert run_inputs.episodes is not None
    run_inputs.episodes.engine = engine
    return TaskRollout(run_inputs.episodes, config.rollout.max_retries, active_episodes)
