"""Workflows that play the number game of these tests, well or with the faults that users' have."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest
from loguru import logger

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask
from astuner.errors import EnvError
from astuner.schema import EnvInstance


class Plays(Workflow):
    """Guesses every number, from the smallest; the model's answers are not used."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        env = workflow_task.env
        assert env is not None
        assert env.env_type == workflow_task.task.env_type
        assert env.profile.main_query == workflow_task.main_query
        await model_tuner.chat([{"role": "user", "content": f"{workflow_task.main_query} {env.observation.text}"}])
        await self.play(env)
        return WorkflowOutput(metadata={"instance": env.instance_id, "steps": len(env.steps)})  # type: ignore[attr-defined]

    async def play(self, env: EnvInstance) -> None:
        number = 0
        while not (env.steps and env.steps[-1].is_done):
            number += 1
            await env.step(str(number))


class Raises(Plays):
    async def play(self, env: EnvInstance) -> None:
        await env.step("1")
        raise RuntimeError("the player resigns")


class Hangs(Plays):
    async def play(self, env: EnvInstance) -> None:
        await asyncio.sleep(1e6)


class Talks(Plays):
    """Sends one message after another to the main process."""

    async def play(self, env: EnvInstance) -> None:
        while True:
            logger.debug("still here")
            await asyncio.sleep(0)


class Blocks(Plays):
    async def play(self, env: EnvInstance) -> None:
        threading.Event().wait()


class CancelsItself(Plays):
    async def play(self, env: EnvInstance) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)


class Exits(Plays):
    async def play(self, env: EnvInstance) -> None:
        os._exit(3)


class Fails(Plays):
    """Its first action is the question's metadata, which names a fault."""

    async def play(self, env: EnvInstance) -> None:
        await env.step("raise")


class SwallowsTheError(Plays):
    """Ends as usual after a fault of the environment."""

    async def play(self, env: EnvInstance) -> None:
        with pytest.raises(EnvError, match="the dice are lost"):
            await env.step("raise")


PLAYERS: dict[str, type[Plays]] = {
    player.__name__: player
    for player in (Plays, Raises, Hangs, Talks, Blocks, CancelsItself, Exits, Fails, SwallowsTheError)
}


class AsTheTaskSays(Workflow):
    """Plays as the player that the task names, so that the tests share their processes."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        player = PLAYERS[workflow_task.task.metadata["player"]]
        return await player().execute(workflow_task, model_tuner)
