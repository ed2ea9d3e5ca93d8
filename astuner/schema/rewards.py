"""The rewards that workflows and judges return."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Real
from typing import Any

from astuner.errors import WorkflowError, short_repr


@dataclass(frozen=True, slots=True)
class AgentStep:
    """The step of an agent in its environment that an LLM call decides.

    Attributes:
        state: the state of the environment before the step, for example its observation.
        step_return: the discounted sum of the agent's rewards from this step on (see `discounted_returns`).

    Raises:
        WorkflowError: the state is not a text, or the return is not a finite number.
    """

    state: str
    step_return: float

    def __post_init__(self) -> None:
        if not isinstance(self.state, str):
            raise WorkflowError(f"AgentStep.state must be a text, got {short_repr(self.state)}")
        object.__setattr__(self, "step_return", checked_reward(self.step_return, "AgentStep.step_return"))


@dataclass(frozen=True, slots=True)
class Judgement:
    """The result of a judge for one episode.

    A judgement without `reward`, `agent_rewards` and `call_rewards` is unscored: the episode has no reward, is not
    trained, and is counted under `unscored_cause`. The values are checked when the judge returns them.

    Attributes:
        reward: the reward of the episode; None if agents or calls have rewards, whose mean it then is, or if the judge
            cannot score the episode.
        is_success: whether the task was solved; None means `reward > 0`.
        components: the parts of the reward by name, for example `{"correct": 1.0, "format": 0.5}`. They are recorded,
            and logged as `reward/{name}/mean`; the algorithm `gdpo` normalises each of them separately.
        agent_rewards: the rewards of the agents by name; every trained agent must be in it.
        call_rewards: the LLM calls' rewards, in the order of `WorkflowOutput.calls`.
        explanation: the reason for the reward, or for its absence.
        unscored_cause: a short name of why the episode is unscored, for example `rate_limit`.
        metadata: further results to record.
        metrics: numbers whose mean over the episodes of a step is logged as `judge/{name}`.
    """

    reward: float | None = None
    is_success: bool | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    agent_rewards: Mapping[str, float] = field(default_factory=dict)
    call_rewards: tuple[float, ...] = ()
    explanation: str = ""
    unscored_cause: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_scored(self) -> bool:
        """Whether it has a reward."""
        return self.reward is not None or bool(self.agent_rewards) or bool(self.call_rewards)


def checked_rewards(reward: Any) -> float | dict[str, float] | tuple[float, ...] | None:
    """Return `WorkflowOutput.reward` with finite floats.

    Raises:
        WorkflowError: it is empty, or contains anything else than finite numbers.
    """
    if reward is None:
        return None
    rewards: dict[str, float] | tuple[float, ...]
    if isinstance(reward, Mapping):
        rewards = {
            str.__str__(str(agent)): checked_reward(value, f"WorkflowOutput.reward[{short_repr(agent)}]")
            for agent, value in reward.items()
        }
    elif isinstance(reward, list | tuple):
        rewards = tuple(checked_reward(value, f"WorkflowOutput.reward[{index}]") for index, value in enumerate(reward))
    else:
        return checked_reward(reward, "WorkflowOutput.reward")
    if not rewards:
        raise WorkflowError(
            f"WorkflowOutput.reward must not be empty, got {short_repr(reward)}; use None to have the judge compute it"
        )
    return rewards


def checked_reward(value: object, name: str) -> float:
    """Return `value` as a finite float.

    Raises:
        WorkflowError: `value` is not a number, or is NaN or infinite.
    """
    with contextlib.suppress(Exception):  # `item` of a tensor with several elements, or an integer beyond all floats
        # numpy and torch scalars are accepted; they have `item`.
        item: Any = value.item() if hasattr(value, "item") else value
        if isinstance(item, Real | Decimal) and math.isfinite(number := float(item)):
            return number
    raise WorkflowError(f"{name} must be a finite number, got {short_repr(value)}")
