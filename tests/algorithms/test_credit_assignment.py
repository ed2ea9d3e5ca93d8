"""Advantages of agents and of calls, worked out by hand."""

from __future__ import annotations

import pytest
import torch

from astuner.algorithms import group_relative_advantages
from astuner.algorithms.credit_assignment import advantages_by_call
from astuner.schema import Episode, LlmCall, Task


def rule(rewards: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    return group_relative_advantages(rewards, group_ids, by_std=False)


def call(name: str, agent: str = "", reward: float | None = None) -> LlmCall:
    return LlmCall(name, "e", (1,), (2,), (-1.0,), "stop", agent_name=agent, reward=reward)


def episode(reward: float, *calls: LlmCall, **agents: float) -> Episode:
    return Episode("e", Task("t", "?"), 0, "ok", reward, True, calls, agent_rewards=agents)


GROUP = torch.zeros(3, dtype=torch.int64)


def test_agents_are_compared_across_episodes():
    """In a zero-sum game, the mean reward of every episode is 0, but the agents' rewards differ."""
    episodes = [
        episode(0.0, call("a0", "a", 1.0), call("b0", "b", -1.0), a=1.0, b=-1.0),
        episode(0.0, call("a1", "a", -1.0), call("b1", "b", 1.0), a=-1.0, b=1.0),
        episode(0.0, call("a2", "a", 0.0), call("b2", "b", 0.0), a=0.0, b=0.0),
    ]
    by_call = advantages_by_call(rule, episodes, torch.zeros(3), GROUP)
    assert by_call == [{"a0": 1.0, "b0": -1.0}, {"a1": -1.0, "b1": 1.0}, {"a2": 0.0, "b2": 0.0}]


def test_agent_that_is_missing_in_an_episode():
    episodes = [
        episode(2.0, call("a0", "a", 2.0), a=2.0),
        episode(9.0, call("b1", "b", 9.0), b=9.0),
        episode(4.0, call("x2")),
    ]
    by_call = advantages_by_call(rule, episodes, torch.zeros(3), GROUP)
    # `a` and `b` are compared with the reward of the third episode, which has no rewards by agent or call.
    assert by_call == [{"a0": -1.0}, {"b1": 2.5}, {}]


def test_call_has_the_advantage_of_an_episode_with_its_reward():
    episodes = [
        episode(2.0, call("c0", reward=0.0), call("c1", reward=4.0), call("c2", reward=4.0)),
        episode(1.0, call("d0")),
        episode(3.0, call("e0")),
    ]
    by_call = advantages_by_call(rule, episodes, torch.tensor([1.0, 0.0, 0.0]), GROUP)
    # With the shaping, 0 becomes 1 of a group (1, 1, 3), and 4 becomes 5 of a group (5, 1, 3).
    assert by_call == [{"c0": pytest.approx(1 - 5 / 3), "c1": 2.0, "c2": 2.0}, {}, {}]
