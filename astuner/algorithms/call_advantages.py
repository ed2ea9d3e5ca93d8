"""Call-level advantages: for calls and agents with their own rewards, and for steps that begin in equal states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from astuner.algorithms.advantages import call_reward_std, group_relative_advantages
from astuner.algorithms.registry import ReinforcementRule
from astuner.errors import BackboneError
from astuner.schema import Episode


def advantages_by_call(
    rule: ReinforcementRule, episodes: Sequence[Episode], shaping: Tensor, group_ids: Tensor, lengths: Tensor
) -> list[dict[str, float]]:
    """Return, by call id, the advantage of each call whose reward differs from its episode's.

    An agent's reward is compared with the same agent's rewards in the group's other episodes; an episode
    without rewards by agent takes part with its own reward. A call with a reward has the advantage that the episode
    would have with that reward, while the other episodes keep theirs. It is divided by the standard deviation of the
    rewards that the episodes have (see `call_reward_std`), so that call advantages are proportional to the differences
    between the calls' rewards.

    Args:
        rule: the algorithm's rule.
        episodes: E episodes with rewards.
        shaping: [E] float32, added to each episode's reward, and to the rewards of its agents and calls.
        group_ids: [E] int64, equal for the episodes of one task.
        lengths: [E] int64, the numbers of trained tokens.

    Returns:
        One mapping for each episode.
    """
    by_call: list[dict[str, float]] = [{} for _ in episodes]
    for agent in sorted({agent for episode in episodes for agent in episode.agent_rewards}):
        members = [index for index, e in enumerate(episodes) if not e.agent_rewards or agent in e.agent_rewards]
        rewards = torch.tensor(
            [episodes[index].agent_rewards.get(agent, episodes[index].reward) for index in members],
            dtype=torch.float32,
        )
        agent_advantages = rule.advantages(rewards + shaping[members], group_ids[members], lengths[members])
        for index, advantage in zip(members, agent_advantages.tolist(), strict=True):
            if episodes[index].agent_rewards:
                calls = [call.call_id for call in episodes[index].calls if call.agent_name == agent]
                by_call[index].update(dict.fromkeys(calls, advantage))
    base = torch.tensor([episode.reward for episode in episodes], dtype=torch.float32)
    spread = torch.zeros(
        len(episodes)
    )  # the mean squared difference between an episode's reward and those of its calls
    for index, episode in enumerate(episodes):
        rewards_of_calls = [call.reward for call in episode.calls if call.reward is not None]
        if rewards_of_calls and not episode.agent_rewards:
            assert episode.reward is not None
            squares = [(reward - episode.reward) ** 2 for reward in rewards_of_calls]
            spread[index] = sum(squares) / len(squares)
    peers = group_ids if rule.advantage.compares_group else torch.zeros_like(group_ids)
    scales = call_reward_std(base + shaping, spread, peers) if rule.norm_adv_by_std else torch.ones(len(episodes))
    for index, episode in enumerate(episodes):
        by_reward: dict[float, float] = {}
        for call in () if episode.agent_rewards else episode.calls:
            if call.reward is None:
                continue
            if call.reward not in by_reward:
                rewards = base.clone()
                rewards[index] = call.reward
                centred = rule.advantages(rewards + shaping, group_ids, lengths, by_std=False)
                by_reward[call.reward] = float(centred[index] / scales[index])
            by_call[index][call.call_id] = by_reward[call.reward]
    return by_call


def anchor_state_advantages(episodes: Sequence[Episode], by_std: bool) -> list[dict[str, float]]:
    """Return each step's advantage over the steps in its group that begin in the same state.

    GiGPO (Feng et al., "Group-in-Group Policy Optimization for LLM Agent Training", arXiv:2505.10978): the steps in all
    of a task's episodes that begin in one state, the anchor state, form a group. A step's advantage is its discounted
    return minus the group's mean, divided by the group's standard deviation.

    Args:
        episodes: E episodes. Calls without a `step` take no part.
        by_std: whether advantages are divided by the standard deviation.

    Returns:
        For each episode, the advantages by call id; exactly 0 in groups of one and in groups with equal returns.

    Raises:
        BackboneError: none of the trained calls has a step.
    """
    trained = [(index, call) for index, episode in enumerate(episodes) for call in episode.calls if call.trained]
    calls = [(index, call, call.step) for index, call in trained if call.step is not None]
    if trained and not calls:
        raise BackboneError(
            "gigpo compares steps that begin in equal states, and no LLM call of the training step has one; play an "
            "environment with rollout.use_agentscope_protocol: false, or return WorkflowOutput(steps=...)"
        )
    groups: dict[tuple[str, str, str], int] = {}
    group_ids = [
        groups.setdefault((episodes[index].task.task_id, call.agent_name, step.state), len(groups))
        for index, call, step in calls
    ]
    returns = torch.tensor([step.step_return for _, _, step in calls], dtype=torch.float32)
    advantages = group_relative_advantages(returns, torch.tensor(group_ids), by_std)
    by_call: list[dict[str, float]] = [{} for _ in episodes]
    for (index, call, _), advantage in zip(calls, advantages.tolist(), strict=True):
        by_call[index][call.call_id] = advantage
    return by_call


def add_to_calls(
    episode_advantages: Sequence[float],
    call_advantages: Sequence[Mapping[str, float]],
    step_advantages: Sequence[Mapping[str, float]],
    coef: float,
) -> list[dict[str, float]]:
    """Return each episode's call advantages by call id, with the step advantages added.

    Args:
        episode_advantages: E advantages of whole episodes.
        call_advantages: for each episode, the advantages of calls that replace the episode's.
        step_advantages: for each episode, what `anchor_state_advantages` returns.
        coef: the coefficient of the step advantages.
    """
    return [
        {**by_call, **{call: by_call.get(call, advantage) + coef * value for call, value in steps.items()}}
        for advantage, by_call, steps in zip(episode_advantages, call_advantages, step_advantages, strict=True)
    ]
