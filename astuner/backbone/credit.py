"""From the rewards of a step's episodes to the advantages of their calls.

A workflow may reward an episode as a whole, each of its agents, or each of its calls. Statistics are over episodes
whichever it is, so that an episode with more calls weighs no more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from astuner.schema import Episode

AdvantageRule = Callable[[Tensor, Tensor], Tensor]


def call_advantages(
    rule: AdvantageRule, episodes: Sequence[Episode], shaping: Tensor, group_ids: Tensor
) -> Sequence[Mapping[str, float]]:
    """Return the advantages of calls that are rewarded apart from their episode, by call id, one mapping an episode.

    An agent's reward is compared with the same agent's rewards in the other episodes of its group, those that have no
    rewards by agent taking part with their one reward. A call's reward is given the advantage that its episode would
    have if that were the episode's reward, the other episodes keeping theirs.

    Args:
        rule: (rewards [E], group_ids [E]) to advantages [E].
        episodes: E episodes with rewards.
        shaping: [E] float32, what is added to each episode's reward, and so to that of its agents and calls.
        group_ids: [E] int64, equal for the episodes of one task.
    """
    found: list[dict[str, float]] = [{} for _ in episodes]
    for agent in sorted({agent for episode in episodes for agent in episode.agent_rewards}):
        _reward_agent(agent, rule, episodes, shaping, group_ids, found)
    whole = torch.tensor([episode.reward for episode in episodes], dtype=torch.float32) + shaping
    for index, episode in enumerate(episodes):
        by_reward: dict[float, float] = {}
        for call in () if episode.agent_rewards else episode.calls:
            if call.reward is None:
                continue
            if call.reward not in by_reward:
                rewards = whole.clone()
                rewards[index] = call.reward + shaping[index]
                by_reward[call.reward] = float(rule(rewards, group_ids)[index])
            found[index][call.call_id] = by_reward[call.reward]
    return found


def _reward_agent(
    agent: str,
    rule: AdvantageRule,
    episodes: Sequence[Episode],
    shaping: Tensor,
    group_ids: Tensor,
    found: Sequence[dict[str, float]],
) -> None:
    """Fill in the advantages of one agent's calls."""
    part = [index for index, one in enumerate(episodes) if not one.agent_rewards or agent in one.agent_rewards]
    given = [episodes[index].agent_rewards.get(agent, episodes[index].reward) for index in part]
    advantages = rule(torch.tensor(given, dtype=torch.float32) + shaping[part], group_ids[part])
    for index, advantage in zip(part, advantages.tolist(), strict=True):
        if episodes[index].agent_rewards:
            own = (call.call_id for call in episodes[index].calls if call.agent_name == agent)
            found[index].update(dict.fromkeys(own, advantage))
