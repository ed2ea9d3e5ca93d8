"""Reward shaping: length punishment and KL penalty."""

from __future__ import annotations

from torch import Tensor


def overlong_punishment(response_lengths: Tensor, max_response_length: int, buffer_length: int) -> Tensor:
    """Return the soft overlong punishment of DAPO (arXiv:2503.14476, eq. 13), to be added to the rewards.

    With L = `max_response_length` and B = `buffer_length`, the punishment of a response of length y is

        0               y ≤ L - B
        (L - B - y) / B L - B < y ≤ L
        -1              y > L

    Args:
        response_lengths: [E] integer, for each of E episodes, the number of tokens after its first prompt.
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
        kl_coef: coefficient.

    Returns:
        [E] float32.
    """
    return (rewards - kl_coef * kl_sums).float()
