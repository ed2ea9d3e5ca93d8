"""A workflow's reward, for the episode as a whole, for its agents or for its calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from astuner.errors import WorkflowError
from astuner.schema import LlmCall

Reward = float | Mapping[str, float] | Sequence[float]


def mean_reward(reward: Reward) -> float:
    """Return the reward of the episode as a whole."""
    if isinstance(reward, float):
        return reward
    values = list(reward.values()) if isinstance(reward, Mapping) else list(reward)
    return sum(values) / len(values)


def share_out(reward: Reward, calls: Sequence[LlmCall]) -> tuple[LlmCall, ...]:
    """Return the calls, each with its own reward where it has one.

    Raises:
        WorkflowError: a trained agent has no reward, or there are not as many rewards as calls.
    """
    if isinstance(reward, float):
        return tuple(calls)
    if isinstance(reward, Mapping):
        agents = {call.agent_name for call in calls if call.trained}
        if missing := sorted(agents - reward.keys()):
            raise WorkflowError(
                f"WorkflowOutput.reward rewards {_named(reward)}, but {_named(missing)} "
                "made LLM calls that are trained: reward every trained agent under the name that it was given by "
                "model_tuner.for_agent(name)"
            )
        return tuple(replace(call, reward=reward[call.agent_name]) if call.trained else call for call in calls)
    if len(reward) != len(calls):
        raise WorkflowError(
            f"WorkflowOutput.reward is a list of {len(reward)} rewards, but the episode made {len(calls)} LLM calls: "
            "give one a call, in the order of model_tuner.calls"
        )
    return tuple(replace(call, reward=value) for call, value in zip(calls, reward, strict=True))


def _named(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names)))
