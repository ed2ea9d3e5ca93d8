"""What is taken off an episode's reward before advantages are computed."""

from __future__ import annotations

from torch import Tensor


def overlong_punishment(response_lengths: Tensor, max_response_length: int, buffer_length: int) -> Tensor:
    """Return DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13), to be added to the rewards.

    With L = `max_response_length` and B = `buffer_length`, a response of length y gets

        0               y ≤ L - B
        (L - B - y) / B L - B < y ≤ L
        -1              y > L

    Args:
        response_lengths: [E] integer, tokens that follow each episode's first prompt.
        max_response_length: tokens.
        buffer_length: tokens, at most `max_response_length`; 0 punishes nothing.

    Returns:
        [E] float32 in [-1, 0].
    """
    lengths = response_lengths.float()
    if buffer_length == 0:
        return lengths.new_zeros(lengths.shape)
    return ((max_response_length - buffer_length - lengths) / buffer_length).clamp(-1.0, 0.0)


def episode_sums(values: Tensor, loss_mask: Tensor, episode_index: Tensor, n_episodes: int) -> Tensor:
    """Sum a per-token quantity over each episode's trained tokens, each as often as it is trained.

    The sums of micro-batches add up to the sum of the whole.

    Args:
        values: [B, T] float.
        loss_mask: [B, T] int64: how often each token is trained.
        episode_index: [B] int64 in 0 … n_episodes - 1: each row's episode, a place in the reward tensor.
        n_episodes: E.

    Returns:
        [E] float32, without gradient.
    """
    per_row = (values.detach() * loss_mask).sum(dim=1).float()
    return per_row.new_zeros(n_episodes).index_add(0, episode_index, per_row)


def rewards_with_kl(rewards: Tensor, kl_sums: Tensor, kl_coef: float) -> Tensor:
    """Return reward - kl_coef × KL estimate of the episode.

    RLOO (arXiv:2402.14740) with k1: the KL of a whole response is the sum over its tokens. Token losses have
    one advantage an episode here, so a token is also charged for the tokens before it, which adds variance
    but no bias against REINFORCE++'s sum over the tokens that follow (arXiv:2501.03262v9).

    Args:
        rewards: [E] float.
        kl_sums: [E] float, `episode_sums` of `token_kl` between the policy that sampled and the reference.
        kl_coef: coefficient.

    Returns:
        [E] float32.
    """
    return (rewards - kl_coef * kl_sums).float()
