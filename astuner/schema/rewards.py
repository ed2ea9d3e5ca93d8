"""The rewards that workflows return."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
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
