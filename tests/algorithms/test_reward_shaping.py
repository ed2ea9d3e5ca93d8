from __future__ import annotations

import pytest
import torch

from astuner.algorithms.advantages import episode_sums, overlong_punishment, rewards_with_kl


def test_overlong_punishment_hand_worked():
    # L = 10, B = 4: free up to 6, then a quarter a token, -1 from 10 on.
    lengths = torch.tensor([0, 6, 7, 9, 10, 11, 500])
    expected = [0.0, 0.0, -0.25, -0.75, -1.0, -1.0, -1.0]
    assert overlong_punishment(lengths, 10, 4).tolist() == expected


def test_no_buffer_punishes_nothing():
    assert overlong_punishment(torch.tensor([5, 11]), 10, 0).tolist() == [0.0, 0.0]


def test_kl_in_reward_hand_worked():
    # Episode 0 has rows 0 and 2: 2 × 0.5 + 1 × 0.25 + 1 × 1.0 = 2.25; episode 1: 0.75. Episode 2 has none.
    kl = torch.tensor([[9.0, 0.5, 0.25], [0.75, 9.0, 9.0], [9.0, 9.0, 1.0]], requires_grad=True)
    mask = torch.tensor([[0, 2, 1], [1, 0, 0], [0, 0, 1]])
    sums = episode_sums(kl, mask, torch.tensor([0, 1, 0]), n_episodes=3)
    assert sums.tolist() == [2.25, 0.75, 0.0]
    assert not sums.requires_grad
    rewards = rewards_with_kl(torch.tensor([1.0, 0.0, 3.0]), sums, kl_coef=0.1)
    assert rewards.tolist() == pytest.approx([0.775, -0.075, 3.0])


def test_sums_of_micro_batches_add_up():
    kl, mask, episodes = torch.rand(4, 5), torch.randint(0, 3, (4, 5)), torch.tensor([1, 0, 1, 2])
    all_sums = episode_sums(kl, mask, episodes, 3)
    parts = [episode_sums(kl[rows], mask[rows], episodes[rows], 3) for rows in (slice(0, 1), slice(1, 4))]
    torch.testing.assert_close(parts[0] + parts[1], all_sums)
