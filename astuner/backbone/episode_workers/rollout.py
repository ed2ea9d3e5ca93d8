"""The rollout of a run whose engine belongs to its process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from astuner.backbone.training.episode_placement import loads_agent_elsewhere, parallel_episodes, uses_workers
from astuner.backbone.training.run_inputs import RunInputs
from astuner.config.root import AstunerConfig
from astuner.doors import through_door
from astuner.llm_engine.protocol import LlmEngine
from astuner.task_rollout import ActiveEpisodes, TaskRollout


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
    if not loads_agent_elsewhere(config):
        yield replace(run_inputs, episodes=through_door("episodes", "here")(job, run_inputs.codec))
        return
    start = through_door("episodes", "processes")
    if uses_workers(config):
        with start(job, parallel_episodes(config), run_inputs.codec) as workers:
            yield replace(run_inputs, episodes=workers)
        return
    with start(job, 1, run_inputs.codec):
        pass
    yield run_inputs


def make_rollout(
    config: AstunerConfig, run_inputs: RunInputs, engine: LlmEngine, active_episodes: ActiveEpisodes
) -> TaskRollout:
    """Return the rollout of a run whose engine belongs to this process."""
    assert run_inputs.episodes is not None
    run_inputs.episodes.engine = engine
    return TaskRollout(run_inputs.episodes, config.rollout.max_retries, active_episodes)
