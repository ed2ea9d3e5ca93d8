"""The data types of interactive environments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from astuner.schema.sampling import Message

Action = str | Mapping[str, Any]
"""An action: a text, or a tool call `{"name": ..., "arguments": {...}}`."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A solution of a task, with which `astuner env validate` checks the environment. Agents do not see it.

    Attributes:
        actions: the actions that solve the task, in order; a single answer is one action.
        score: the score that they reach.
    """

    actions: tuple[Action, ...]
    score: float = 1.0


@dataclass(frozen=True, slots=True)
class TaskProfile:
    """A task of an environment.

    Attributes:
        task_id: unique and stable within its split.
        main_query: the instruction for the agent: the rules, the goal and the form of actions.
        init_messages: chat messages that precede the instruction.
        metadata: further fields, for workflows and judges.
        reference: a solution, if the environment has one.
        max_steps: the number of steps after which the environment ends; None if it has no limit.
    """

    task_id: str
    main_query: str
    init_messages: tuple[Message, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    reference: Reference | None = None
    max_steps: int | None = None


@dataclass(frozen=True, slots=True)
class Observation:
    """What an agent sees before its action.

    Attributes:
        text: the observation.
        agent: the name of the agent that acts next, in environments with several agents; "" if there is one.
        legal_actions: the actions that are possible, if the environment lists them.
    """

    text: str
    agent: str = ""
    legal_actions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of an action.

    Attributes:
        observation: what the next agent sees.
        reward: the reward of the step; with several agents, the rewards by name.
        is_done: whether the task has ended. The environment accepts no further action.
        is_valid: whether the environment understood the action.
        info: further values.
    """

    observation: Observation
    reward: float | Mapping[str, float] = 0.0
    is_done: bool = False
    is_valid: bool = True
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The score of an instance.

    Attributes:
        score: the score so far; with several agents, the scores by name.
        is_success: whether the task is solved; None means that the score is positive.
        details: how the score came about.
    """

    score: float | Mapping[str, float]
    is_success: bool | None = None
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EnvTask:
    """What a client needs to create an environment's instance for a task.

    Attributes:
        env_type: the name of the environment in the service.
        split: the split of the task in the environment.
        task_id: the id of the task in the environment.
        params: the keyword arguments of the environment.
        action_preference: the form of actions that the workflow prefers: `code`, `text` or `box`.
        url: the address of the service as configured; `auto` is the service that the run starts.
    """

    env_type: str
    split: str
    task_id: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    action_preference: Literal["code", "text", "box"] = "text"
    url: str = "auto"


class EnvInstance(Protocol):
    """A running instance of an environment, as an episode sees it. It is released when the episode ends.

    Attributes:
        env_type: the environment, for example `gymnasium/FrozenLake-v1`.
        profile: the task, without its reference.
        observation: the current observation.
        tools: the tools of the environment, as OpenAI function schemas; their calls are actions.
        steps: the results of the actions so far, in order.
    """

    env_type: str
    profile: TaskProfile
    observation: Observation
    tools: Sequence[Mapping[str, Any]]
    steps: Sequence[StepResult]

    async def step(self, action: Action) -> StepResult:
        """Perform an action.

        Raises:
            EnvError: the environment failed, or the task has ended.
        """

    async def evaluate(self) -> Evaluation:
        """Return the score so far.

        Raises:
            EnvError: the environment failed.
        """
