"""Reward shaping, and advantage estimators: from the rewards of episodes to their advantages.

Statistics are over episodes, not over samples: an episode counts once, no matter how many samples it has, and all its
samples inherit its advantage.

The estimators take `rewards`, [E] float, one per episode; `group_ids`, [E] int64, equal for the episodes of one task in
one step, arbitrary integers; and `by_std`, whether to divide by the group's standard deviation. It is unbiased (n - 1),
plus `STD_EPSILON`. They return [E] float32, exactly 0 in a group without variance, including groups of one, unless
their docstrings say otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from astuner.errors import BackboneError, shorten
from astuner.schema import Episode

STD_EPSILON = 1e-6
"""Added to a standard deviation before dividing by it."""

MIN_CALL_STD = 0.1
"""The least standard deviation that divides call advantages, as a fraction of the call rewards'."""


def has_signal(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Return, for each episode, whether the rewards of its group differ.

    In a group without variance, all group-relative advantages are 0. DAPO (arXiv:2503.14476, eq. 11, "dynamic
    sampling") leaves such groups out. For it, pass the rewards before shaping, so that a length punishment does not
    give variance to a group whose answers are all correct or all wrong.

    Returns:
        [E] bool. A group of one has no variance.
    """
    group = _group_index(group_ids)
    values = _exact(rewards)
    empty = torch.zeros_like(values)
    highest = empty.scatter_reduce(0, group, values, "amax", include_self=False)
    lowest = empty.scatter_reduce(0, group, values, "amin", include_self=False)
    return (highest > lowest)[group]


def group_relative_advantages(rewards: Tensor, group_ids: Tensor, by_std: bool) -> Tensor:
    """Return reward minus the group's mean, divided by the group's standard deviation if `by_std`.

    With the division: GRPO (DeepSeekMath, arXiv:2402.03300, section 4.1.2), DAPO (arXiv:2503.14476, eq. 9),
    GSPO (arXiv:2507.18071, eq. 6) and CISPO (arXiv:2506.13585). Without: Dr. GRPO (arXiv:2503.20783,
    section 3.2). The papers do not specify the standard deviation's estimator. This is the unbiased one, as in
    `torch.std` and in common implementations.
    """
    group = _group_index(group_ids)
    centred = _centred(rewards, group)
    scaled = centred / _group_std(centred, group) if by_std else centred
    return scaled.float()


def leave_one_out_advantages(rewards: Tensor, group_ids: Tensor, by_std: bool) -> Tensor:
    """Return reward minus the mean reward of the group's other episodes.

    RLOO (arXiv:2402.14740, the section on REINFORCE Leave-One-Out): A_i = r_i - 1/(k - 1) sum over j ≠ i
    of r_j, which is k / (k - 1) times the reward minus the group's mean. The paper does not divide by the standard
    deviation; with `by_std`, this function does, as in `group_relative_advantages`.
    """
    group = _group_index(group_ids)
    centred = _centred(rewards, group)
    sizes = _sizes(group)
    advantages = centred * sizes / (sizes - 1).clamp(min=1)
    scaled = advantages / _group_std(centred, group) if by_std else advantages
    return scaled.float()


def batch_normalised_advantages(rewards: Tensor, group_ids: Tensor, by_std: bool) -> Tensor:
    """Return rewards normalised over the whole batch, regardless of the groups.

    REINFORCE++ (arXiv:2501.03262v9, "global advantage normalisation"): A = (r - the batch's mean) / the batch's
    standard deviation. This is the variant that version 9 of the paper calls REINFORCE++ (k ≥ 1, no baseline), not
    "REINFORCE++ with baseline", which subtracts the group's mean first. In the paper, the statistics are over tokens,
    so that long responses weigh more, and a token is charged only with the KL penalty of the tokens after it; here both
    are computed per episode.
    `group_ids` has no effect: a group without variance can have an advantage over the batch.

    Returns:
        [E] float32, exactly 0 if the batch has no variance.
    """
    return group_relative_advantages(rewards, torch.zeros_like(group_ids), by_std)


def group_centred_advantages(rewards: Tensor, group_ids: Tensor, by_std: bool) -> Tensor:
    """Return reward minus the group's mean, divided by the standard deviation of the batch if `by_std`.

    REINFORCE++ with baseline (arXiv:2501.03262v9): A' = r - the group's mean; A = (A' - the batch's mean) / the batch's
    standard deviation. The mean of A' over the batch is 0. As in `batch_normalised_advantages`, the statistics are over
    episodes, and in the paper over tokens. `by_std` divides by the standard deviation of A' over the batch.
    """
    centred = _centred(rewards, _group_index(group_ids))
    scaled = centred / _group_std(centred, torch.zeros_like(group_ids)) if by_std else centred
    return scaled.float()


def length_weighted_advantages(
    rewards: Tensor, group_ids: Tensor, by_std: bool, lengths: Tensor | None = None
) -> Tensor:
    """Return each reward minus its group's mean reward, weighted by episode length.

    OPO (arXiv:2505.23585): the baseline that minimises the gradient's variance is the mean reward, weighted by the
    squared norm ‖∇ log π(y)‖², which is about proportional to y's length l: Σ l r / Σ l. The paper does not divide by
    the standard deviation.

    Args:
        rewards, group_ids, by_std: see the module's docstring.
        lengths: [E] integer or float, the numbers of trained tokens, at least 1; None for equal lengths.
    """
    group = _group_index(group_ids)
    centred = _centred(rewards, group)
    weights = torch.ones_like(centred) if lengths is None else lengths.to(centred).clamp(min=1)
    advantages = centred - _group_sum(weights * centred, group) / _group_sum(weights, group)
    scaled = advantages / _group_std(centred, group) if by_std else advantages
    return scaled.float()


def mean_normalised_advantages(rewards: Tensor, group_ids: Tensor, by_std: bool) -> Tensor:
    """Return reward minus the group's mean, divided by the group's mean.

    MaxRL (arXiv:2602.02710, algorithm 1): with rewards of 0 and 1, A = (r - p) / p, where p is the group's success
    rate. With k episodes per group, the expected gradient is the gradient of -Σ (1 - P)^j / j over 0 < j < k, where P
    is the success probability and (1 - P)^j is one minus pass@j. The sum tends to log P. A task whose successes are
    rare has more weight than in GRPO. Advantages are exactly 0 in groups without success. The paper does not divide by
    the standard deviation.

    Raises:
        BackboneError: a reward is negative.
    """
    if (rewards < 0).any():
        raise BackboneError(
            f"maxrl divides rewards by the mean of their group, so rewards must be at least 0; the smallest is "
            f"{float(rewards.min()):g}. Write algorithm: grpo, or shift the rewards in the workflow or the judge"
        )
    group = _group_index(group_ids)
    centred = _centred(rewards, group)
    mean = _exact(rewards) - centred
    advantages = centred / torch.where(mean > 0, mean, 1.0)
    scaled = advantages / _group_std(centred, group) if by_std else advantages
    return scaled.float()


def group_decoupled_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    by_std: bool,
    weights: Sequence[float] | None = None,
    shaping: Tensor | None = None,
) -> Tensor:
    """Return the weighted sum of several rewards' group-relative advantages, normalised over the batch.

    GDPO (arXiv:2601.05242): A_k = (r_k - group mean) / group standard deviation, for each reward k;
    A_sum = sum over k of w_k A_k; A = (A_sum - batch mean) / batch standard deviation. Each group's advantages sum to
    0. The batch mean is therefore 0, too, and is not computed.

    Args:
        rewards: [E] or [E, K] float, K rewards per episode. NaN stands for a reward that an episode does not have: it
            takes no part in the statistics of this reward, and its advantage is 0.
        group_ids: see the module's docstring.
        by_std: divide by the groups' and the batch's standard deviations.
        weights: K weights; None for 1.
        shaping: [E] float, added to A_sum after subtracting the mean of the group, for example a length punishment.

    Returns:
        [E] float32, exactly 0 in a group in which no reward has variance.
    """
    columns = rewards.reshape(len(rewards), -1)
    combined = torch.zeros(len(rewards), dtype=torch.float64)
    for weight, column in zip(weights or [1.0] * columns.shape[1], columns.unbind(1), strict=True):
        has_reward = ~column.isnan()
        relative = group_relative_advantages(column[has_reward], group_ids[has_reward], by_std)
        combined[has_reward] += weight * relative.double()
    if shaping is not None:
        combined += _centred(shaping, _group_index(group_ids))
    if by_std:
        combined /= _group_std(combined, torch.zeros_like(group_ids))
    return combined.float()


def call_reward_std(rewards: Tensor, call_variances: Tensor, group_ids: Tensor) -> Tensor:
    """Return the standard deviation that divides the advantages of calls that have their own rewards.

    It is the standard deviation of the episodes' rewards in the group, as for an episode's advantage, but at least
    `MIN_CALL_STD` times the call rewards' standard deviation: episodes with equal rewards can contain calls with
    unequal rewards.

    Args:
        rewards: [E] float, the episodes' rewards.
        call_variances: [E] float, the mean squared difference between an episode's reward and those of its calls.
        group_ids: [E] int64, equal for the episodes whose rewards are compared.

    Returns:
        [E] float32, unbiased (n - 1), plus `STD_EPSILON`.
    """
    group = _group_index(group_ids)
    centred = _centred(rewards, group)
    of_calls = (centred.square() + call_variances.double()).sqrt()
    return torch.maximum(_group_std(centred, group), MIN_CALL_STD * _group_std(of_calls, group)).float()


def _exact(rewards: Tensor) -> Tensor:
    """Return float32 rewards as float64, in which the sum of many equal float32 numbers is exact.

    The mean of equal rewards then equals each one, and their advantage is exactly 0.
    """
    return rewards.float().double()


def _group_index(group_ids: Tensor) -> Tensor:
    """Return the group of each episode as an index from 0 to E - 1."""
    group: Tensor = torch.unique(group_ids, return_inverse=True)[1]
    return group


def _group_sum(values: Tensor, group: Tensor) -> Tensor:
    """Return, for each episode, its group's sum of values, [E]."""
    return torch.zeros_like(values).index_add(0, group, values)[group]


def _sizes(group: Tensor) -> Tensor:
    return _group_sum(torch.ones_like(group, dtype=torch.float64), group)


def _centred(rewards: Tensor, group: Tensor) -> Tensor:
    values = _exact(rewards)
    return values - _group_sum(values, group) / _sizes(group)


def _group_std(centred: Tensor, group: Tensor) -> Tensor:
    variance = _group_sum(centred.square(), group) / (_sizes(group) - 1).clamp(min=1)
    return variance.sqrt() + STD_EPSILON


def overlong_punishment(response_lengths: Tensor, max_response_length: int, buffer_length: int) -> Tensor:
    """Return the soft overlong punishment of DAPO (arXiv:2503.14476, eq. 13), to be added to the rewards.

    With L = `max_response_length` and B = `buffer_length`, the punishment of a response with length y is

        0               y ≤ L - B
        (L - B - y) / B L - B < y ≤ L
        -1              y > L

    Args:
        response_lengths: [E] integer, by episode, the number of tokens after its first prompt.
        max_response_length: tokens.
        buffer_length: tokens, at most `max_response_length`; 0 for no punishment.

    Returns:
        [E] float32 in [-1, 0].
    """
    lengths = response_lengths.float()
    if buffer_length == 0:
        return lengths.new_zeros(lengths.shape)
    return ((max_response_length - buffer_length - lengths) / buffer_length).clamp(-1.0, 0.0)


def episode_sums(values: Tensor, train_counts: Tensor, episode_index: Tensor, n_episodes: int) -> Tensor:
    """Return each episode's sum of a per-token quantity over its trained tokens, weighted by the train counts.

    The sums of micro-batches add up to the sum over the batch.

    Args:
        values: [B, T] float.
        train_counts: [B, T] int64, how often each token is trained.
        episode_index: [B] int64 in 0 … n_episodes - 1, the index of each row's episode in the reward tensor.
        n_episodes: E, the number of episodes.

    Returns:
        [E] float32, without gradient.
    """
    per_row = (values.detach() * train_counts).sum(dim=1).float()
    return per_row.new_zeros(n_episodes).index_add(0, episode_index, per_row)


def rewards_with_kl(rewards: Tensor, kl_sums: Tensor, kl_coef: float) -> Tensor:
    """Return reward - kl_coef × KL estimate of the episode.

    As in RLOO (arXiv:2402.14740) with k1, the KL of a response is the sum over its tokens. All tokens in an episode
    have the same advantage, so a token's advantage includes earlier tokens' KL. Compared with REINFORCE++, which sums
    over the tokens that follow (arXiv:2501.03262v9), this adds variance but no bias.

    Args:
        rewards: [E] float, one per episode.
        kl_sums: [E] float, the `episode_sums` of `token_kl` between the policy that sampled and the reference.

    Returns:
        [E] float32.
    """
    return (rewards - kl_coef * kl_sums).float()


@dataclass(frozen=True)
class RewardComponents:
    """The K reward components of a step's E episodes.

    Attributes:
        weights: K weights.
        rewards: [E, K] float32; NaN if the judge of an episode has not returned the component.
    """

    weights: tuple[float, ...]
    rewards: Tensor

    def advantages(self, group_ids: Tensor, by_std: bool, shaping: Tensor) -> Tensor:
        """Return the advantages of the episodes, [E] float32; see `group_decoupled_advantages`."""
        return group_decoupled_advantages(self.rewards, group_ids, by_std, self.weights, shaping)

    def have_signal(self, group_ids: Tensor) -> Tensor:
        """Return, for each episode, whether a component with a weight differs in its group, [E] bool.

        The weighted sums of the components can still be equal.
        """
        signal = torch.zeros(len(group_ids), dtype=torch.bool)
        for weight, column in zip(self.weights, self.rewards.unbind(1), strict=True):
            has_reward = ~column.isnan()
            differs = has_signal(column[has_reward], group_ids[has_reward])
            if weight != 0:
                signal |= torch.isin(group_ids, group_ids[has_reward][differs])
        return signal


def reward_components(episodes: Sequence[Episode], weights: Mapping[str, float]) -> RewardComponents:
    """Return the reward components of a step's episodes.

    An episode without a judgement, for example one whose reward the workflow has returned, has its reward as each
    component. The reward is the only component if `weights` is empty and no component has a name without a dot.

    Args:
        episodes: E episodes with a reward.
        weights: the weights of the components by name. If empty, each component whose name has no dot has weight 1.

    Raises:
        BackboneError: no episode has a component of `weights`.
    """
    by_episode = [
        episode.judgement.components if episode.judgement is not None and episode.judgement.components else None
        for episode in episodes
    ]
    names = sorted({name for components in by_episode for name in components or ()})
    if missing := [name for name in weights if name not in names]:
        raise BackboneError(
            f"trainer_common.algorithm.component_weights names {shorten(', '.join(missing))}, which no episode of the "
            f"step has; the components that the judge returned are: {shorten(', '.join(names)) or 'none'}. Name those, "
            "or return the others as `components` of the judgement"
        )
    used = dict(weights) or {name: 1.0 for name in names if "." not in name}
    if not used:
        rewards = torch.tensor([[episode.reward] for episode in episodes], dtype=torch.float32)
        return RewardComponents((1.0,), rewards)
    rows = [
        [episode.reward if components is None else components.get(name, math.nan) for name in used]
        for episode, components in zip(episodes, by_episode, strict=True)
    ]
    return RewardComponents(tuple(used.values()), torch.tensor(rows, dtype=torch.float32))
