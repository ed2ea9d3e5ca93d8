"""Environments of the agent loop's tests, and episodes of them with scripted answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from astuner.env_service import Environment
from astuner.errors import EnvError
from astuner.model_tuner.chat_options import CallSettings
from astuner.model_tuner.codec import ChatCodec
from astuner.model_tuner.targets import Targets
from astuner.schema import (
    Action,
    EnvTask,
    Episode,
    Evaluation,
    Observation,
    StepResult,
    Task,
    TaskProfile,
    WorkflowTask,
)
from astuner.task_judge.judge_base import BaseJudge
from astuner.task_runner.runner import TaskRunner
from astuner.workflows.agent_loop.workflow import EnvWorkflow, LoopSettings
from tests.scripted_engine import ScriptedEngine


class Corridor(Environment):
    """A corridor of five cells, whose last one is the goal. Each step to the right has the reward 0.25."""

    length = 5

    def __init__(self) -> None:
        self.position = 0
        self.actions: list[Action] = []

    def task_ids(self, split: str) -> Sequence[str]:
        return ("corridor",)

    def profile(self, split: str, task_id: str) -> TaskProfile:
        return TaskProfile(task_id, "Walk to the goal.", ({"role": "system", "content": "You walk."},))

    def reset(self, split: str, task_id: str, seed: int) -> Observation:
        return self.observation()

    def observation(self) -> Observation:
        return Observation(f"You are at {self.position}.")

    def step(self, action: Action) -> StepResult:
        self.actions.append(action)
        word = action if isinstance(action, str) else action["arguments"].get("to")
        moves = {"right": 1, "left": -1}
        self.position = max(0, self.position + moves.get(str(word), 0))
        reward = 0.25 * moves.get(str(word), 0)
        return StepResult(self.observation(), reward, self.position == self.length - 1, str(word) in moves)

    def evaluate(self) -> Evaluation:
        return Evaluation(self.position / (self.length - 1), self.position == self.length - 1)


class PraisingCorridor(Corridor):
    """A corridor in which every answer has the reward 1, even one without an action."""

    def step(self, action: Action) -> StepResult:
        return StepResult(self.observation(), 1.0)


class CorridorWithTools(Corridor):
    """A corridor with a tool for the steps."""

    tools = (
        {
            "type": "function",
            "function": {
                "name": "go",
                "description": "Walk one step.",
                "parameters": {"type": "object", "properties": {"to": {"type": "string"}}, "required": ["to"]},
            },
        },
    )


class HighCard(Environment):
    """Three seats say one number each, twice. The highest sum wins 1 from each of the others."""

    seats = ("north", "east", "south")

    def __init__(self) -> None:
        self.said: list[float] = []

    def task_ids(self, split: str) -> Sequence[str]:
        return ("cards",)

    def profile(self, split: str, task_id: str) -> TaskProfile:
        return TaskProfile(task_id, "Say a high number.")

    def reset(self, split: str, task_id: str, seed: int) -> Observation:
        return self.observation()

    def observation(self) -> Observation:
        seat = self.seats[len(self.said) % 3]
        return Observation(f"{seat}, round {len(self.said) // 3}.", seat)

    def step(self, action: Action) -> StepResult:
        self.said.append(float(str(action)))
        is_done = len(self.said) == 6
        rewards = self.scores() if is_done else {}
        return StepResult(self.observation(), rewards, is_done)

    def scores(self) -> dict[str, float]:
        sums = {seat: sum(self.said[index::3]) for index, seat in enumerate(self.seats)}
        winner = max(sums, key=lambda seat: sums[seat])
        return {seat: 2.0 if seat == winner else -1.0 for seat in self.seats}

    def evaluate(self) -> Evaluation:
        return Evaluation(self.scores())


@dataclass
class LocalInstance:
    """An instance in the process of the test."""

    environment: Environment
    split: str = "train"
    env_type: str = "local"
    profile: TaskProfile = field(init=False)
    observation: Observation = field(init=False)
    tools: Sequence[Mapping[str, Any]] = field(init=False)
    steps: list[StepResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        task_id = self.environment.task_ids(self.split)[0]
        self.profile = self.environment.profile(self.split, task_id)
        self.observation = self.environment.reset(self.split, task_id, 0)
        self.tools = self.environment.tools

    async def step(self, action: Action) -> StepResult:
        await asyncio.sleep(0)
        if self.steps and self.steps[-1].is_done:
            raise EnvError("the task has ended")
        result = self.environment.step(action)
        self.steps.append(result)
        self.observation = result.observation
        return result

    async def evaluate(self) -> Evaluation:
        return self.environment.evaluate()


QWEN3 = {"name": "qwen3", "thinking_retention": "all"}
Play = Callable[..., Episode]


@pytest.fixture
def play(tokenizer: Any) -> Play:
    """Return a function that plays an environment with the given answers of the model, and returns the episode."""

    def run(
        environment: Environment | None,
        answers: Sequence[str],
        *,
        settings: LoopSettings | None = None,
        renderer: str = "qwen3",
        targets: Targets | None = None,
        judge: BaseJudge | None = None,
        on_max_steps: Any = "judge",
        env_task: EnvTask | None = None,
        **calls: Any,
    ) -> Episode:
        codec = ChatCodec(tokenizer, renderer if renderer != "qwen3" else QWEN3)
        left = [codec.tokenizer.encode(f"{answer}<|im_end|>", add_special_tokens=False) for answer in answers]
        runner = TaskRunner(
            workflow=lambda: EnvWorkflow(settings or LoopSettings(has_judge=judge is not None)),
            judge=judge,
            engine=ScriptedEngine(lambda prompt, params: left.pop(0), max_model_len=8192),
            codec=codec,
            targets=targets or Targets(),
            on_max_steps=on_max_steps,
        )
        task = WorkflowTask(
            Task("task", "unused", env=env_task),
            "episode",
            env=None if environment is None else LocalInstance(environment),
        )
        limits = {"max_model_len": 8192, "max_prompt_length": 8192, "max_response_length": 8192, **calls}

        async def episode() -> Episode:
            return await runner.run(task, runner.tuner(task, CallSettings(**limits)))

        return asyncio.run(episode())

    return run
