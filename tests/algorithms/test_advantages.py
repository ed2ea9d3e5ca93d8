from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astuner.algorithms.advantages import (
    batch_normalised_advantages,
    group_centred_advantages,
    group_decoupled_advantages,
    group_relative_advantages,
    has_signal,
    leave_one_out_advantages,
    length_weighted_advantages,
    mean_normalised_advantages,
)
from astuner.errors import BackboneError
from tests.examples import examples

GROUPED = [group_relative_advantages, leave_one_out_advantages, length_weighted_advantages]
ALL = [*GROUPED, batch_normalised_advantages, group_centred_advantages, group_decoupled_advantages]

episodes = st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.7, 1.0, -2.0]), st.integers(-3, 3)), min_size=1, max_size=12)


def columns(pairs):
    rewards, groups = zip(*pairs, strict=True)
    return torch.tensor(rewards), torch.tensor(groups)


def test_hand_worked():
    # Group 5: rewards 1, 0, 2, mean 1, std √((0 + 1 + 1) / 2) = 1. Group -1: rewards 3, 0, mean 1.5, std √4.5.
    rewards, groups = torch.tensor([1.0, 3.0, 0.0, 2.0, 0.0]), torch.tensor([5, -1, 5, 5, -1])
    grpo = group_relative_advantages(rewards, groups, by_std=True)
    assert grpo.tolist() == pytest.approx([0.0, 0.70711, -1.0, 1.0, -0.70711], abs=5e-6)
    dr_grpo = group_relative_advantages(rewards, groups, by_std=False)
    assert dr_grpo.tolist() == [0.0, 1.5, -1.0, 1.0, -1.5]
    # Others' means: 1 of (0, 2), 0, 1.5 of (1, 2), 0.5 of (1, 0), 3.
    rloo = leave_one_out_advantages(rewards, groups, by_std=False)
    assert rloo.tolist() == [0.0, 3.0, -1.5, 1.5, -3.0]
    # Divided by 1 and √4.5 = 2.12132.
    rloo = leave_one_out_advantages(rewards, groups, by_std=True)
    assert rloo.tolist() == pytest.approx([0.0, 1.41421, -1.5, 1.5, -1.41421], abs=5e-6)
    # All: mean 1.2, deviations -0.2 1.8 -1.2 0.8 -1.2, squares 0.04 3.24 1.44 0.64 1.44 = 6.8, std √1.7 = 1.30384.
    batch = batch_normalised_advantages(rewards, groups, by_std=True)
    assert batch.tolist() == pytest.approx([-0.15339, 1.38054, -0.92036, 0.61357, -0.92036], abs=1e-5)
    assert batch_normalised_advantages(rewards, groups, by_std=False).tolist() == pytest.approx(
        [-0.2, 1.8, -1.2, 0.8, -1.2]
    )


def test_advantages_over_the_groups_mean_hand_worked():
    # Group 5: 1 of 4 succeeds, mean 0.25: (1 - 0.25) / 0.25 = 3 and -1. Group 2: 3 of 4, mean 0.75: 1 / 3 and -1.
    # Group 1 has no success, and group 9 no failure.
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0])
    groups = torch.tensor([5, 5, 5, 5, 2, 2, 2, 2, 1, 1, 9])
    expected = [3.0, -1.0, -1.0, -1.0, 1 / 3, 1 / 3, -1.0, 1 / 3, 0.0, 0.0, 0.0]
    assert mean_normalised_advantages(rewards, groups, by_std=False).tolist() == pytest.approx(expected, rel=1e-6)
    # Divided by the standard deviation of group 5, √(0.75 / 3) = 0.5.
    assert mean_normalised_advantages(rewards, groups, by_std=True)[:2].tolist() == pytest.approx([6, -2], rel=1e-5)


def test_the_mean_over_a_group_of_k_estimates_the_gradient_of_the_truncated_series_of_log_p():
    # MaxRL, with one parameter x, p = sigmoid(x), and d log π = 1 - p for a success and -p for a failure.
    # The derivative of -sum over j = 1 … k - 1 of (1 - p)^j / j is p (1 - p) × sum over j < k - 1 of (1 - p)^j.
    k, p = 4, 0.3
    expectation = 0.0
    for outcome in range(2**k):
        rewards = torch.tensor([float(outcome >> bit & 1) for bit in range(k)])
        advantages = mean_normalised_advantages(rewards, torch.zeros(k), by_std=False)
        scores = torch.where(rewards > 0, 1 - p, -p)
        probability = math.prod(p if reward else 1 - p for reward in rewards.tolist())
        expectation += probability * float((advantages * scores).mean())
    assert expectation == pytest.approx(p * (1 - p) * sum((1 - p) ** j for j in range(k - 1)), rel=1e-5)


def test_negative_rewards_have_no_advantage_over_the_groups_mean():
    with pytest.raises(
        BackboneError, match=r"rewards must be at least 0; the smallest is -0\.5\. Write algorithm: grpo"
    ):
        mean_normalised_advantages(torch.tensor([1.0, -0.5]), torch.tensor([0, 0]), by_std=False)


def test_the_baseline_weighted_by_lengths_hand_worked():
    # Group 5: (6 × 1 + 2 × 0) / 8 = 0.75. Group 1: (1 × 2 + 3 × 0 + 1 × 1) / 5 = 0.6, std of 2 0 1: 1.
    rewards, groups = torch.tensor([1.0, 0.0, 2.0, 0.0, 1.0]), torch.tensor([5, 5, 1, 1, 1])
    lengths = torch.tensor([6, 2, 1, 3, 1])
    expected = [0.25, -0.75, 1.4, -0.6, 0.4]
    assert length_weighted_advantages(rewards, groups, False, lengths).tolist() == pytest.approx(expected)
    assert length_weighted_advantages(rewards, groups, True, lengths)[2:].tolist() == pytest.approx(
        expected[2:], rel=1e-5
    )
    equal = length_weighted_advantages(rewards, groups, False)
    torch.testing.assert_close(equal, group_relative_advantages(rewards, groups, False))


def test_centred_advantages_divided_by_the_std_of_the_batch_hand_worked():
    # Group 5: 1 and 0, mean 0.5; group -1: 3, 0 and 0, mean 1. Squares: 0.25 0.25 4 1 1 = 6.5, std √(6.5 / 4).
    rewards, groups = torch.tensor([1.0, 3.0, 0.0, 0.0, 0.0]), torch.tensor([5, -1, 5, -1, -1])
    assert group_centred_advantages(rewards, groups, by_std=False).tolist() == [0.5, 2.0, -0.5, -1.0, -1.0]
    std = math.sqrt(1.625)
    expected = [0.5 / std, 2 / std, -0.5 / std, -1 / std, -1 / std]
    assert group_centred_advantages(rewards, groups, by_std=True).tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("by_std", [True, False])
@pytest.mark.parametrize("function", [*ALL, mean_normalised_advantages])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(reward=st.floats(-1e6, 1e6), size=st.integers(1, 40))
@settings(max_examples=examples(20), deadline=None)
def test_no_variance_is_exactly_zero(function, by_std, dtype, reward, size):
    rewards = torch.full((size,), abs(reward) if function is mean_normalised_advantages else reward, dtype=dtype)
    assert not function(rewards, torch.full((size,), 4), by_std).any()


@pytest.mark.parametrize("by_std", [True, False])
@pytest.mark.parametrize("function", GROUPED)
def test_groups_are_independent(function, by_std):
    rewards = torch.tensor([1.0, 0.0, 5.0, 7.0, 100.0])
    groups = torch.tensor([0, 0, 1, 1, 2])
    both = function(rewards, groups, by_std)
    assert both[:2].equal(function(rewards[:2], groups[:2], by_std))
    assert both[2:4].equal(function(rewards[2:4], groups[2:4], by_std))
    assert both[4] == 0


@pytest.mark.parametrize("by_std", [True, False])
@pytest.mark.parametrize("function", ALL)
@given(pairs=episodes, seed=st.integers(0, 99))
@settings(max_examples=examples(40), deadline=None)
def test_order_and_names_of_groups_do_not_matter(function, by_std, pairs, seed):
    rewards, groups = columns(pairs)
    order = list(range(len(pairs)))
    random.Random(seed).shuffle(order)
    straight = function(rewards, groups, by_std)
    torch.testing.assert_close(function(rewards[order], groups[order] * 17 + 3, by_std), straight[order])
    assert straight.dtype == torch.float32


@given(pairs=episodes)
@settings(max_examples=examples(40), deadline=None)
def test_grpo_advantages_of_a_group_have_mean_zero_and_unit_spread(pairs):
    rewards, groups = columns(pairs)
    advantages = group_relative_advantages(rewards, groups, by_std=True)
    signal = has_signal(rewards, groups)
    for group in groups.unique():
        of_group = advantages[groups == group]
        assert float(of_group.mean()) == pytest.approx(0, abs=1e-5)
        if signal[groups == group].any():
            assert float(of_group.std()) == pytest.approx(1, abs=1e-4)


def test_signal_is_variance_within_a_group():
    rewards = torch.tensor([1.0, 0.0, 2.0, 2.0, 3.0])
    groups = torch.tensor([9, 9, 4, 4, 1])
    assert has_signal(rewards, groups).tolist() == [True, True, False, False, False]


def test_decoupled_rewards_hand_worked():
    """Two groups of two: both rewards differ in the first, one of them in the second.

    The advantages of a reward that differs are ±1/√2 = ±0.70711. Sums: ±1.41421 and ±0.70711. Their squares add up to
    5, the standard deviation of the batch is √(5 / 3) = 1.29099.
    """
    rewards = torch.tensor([[1.0, 10.0], [0.0, 0.0], [1.0, 3.0], [0.0, 3.0]])
    groups = torch.tensor([7, 7, 2, 2])
    assert group_decoupled_advantages(rewards, groups, by_std=True).tolist() == pytest.approx(
        [1.09545, -1.09545, 0.54772, -0.54772], abs=1e-5
    )
    assert group_decoupled_advantages(rewards, groups, by_std=False).tolist() == [5.5, -5.5, 0.5, -0.5]
    # GRPO on the sum cannot tell the groups apart.
    grpo = group_relative_advantages(rewards.sum(1), groups, by_std=True)
    assert grpo.tolist() == pytest.approx([0.70711, -0.70711, 0.70711, -0.70711], abs=1e-5)
    # Weights 1 and -0.5: sums ±0.35355 and ±0.70711, squares 0.25 + 1, std √(1.25 / 3) = 0.64550.
    weighted = group_decoupled_advantages(rewards, groups, by_std=True, weights=[1.0, -0.5])
    assert weighted.tolist() == pytest.approx([0.54772, -0.54772, 1.09545, -1.09545], abs=1e-5)


def test_a_missing_reward_takes_no_part():
    rewards = torch.tensor([[1.0, 1.0], [0.0, float("nan")], [0.5, 0.0]])
    groups = torch.zeros(3, dtype=torch.int64)
    first = group_relative_advantages(rewards[:, 0], groups, by_std=False)
    second = torch.tensor([0.5, 0.0, -0.5])
    assert group_decoupled_advantages(rewards, groups, by_std=False).tolist() == (first + second).tolist()


def test_shaping_is_added_to_the_sum_of_the_advantages():
    rewards, groups = torch.tensor([[1.0, 2.0], [0.0, 2.0], [5.0, 5.0]]), torch.tensor([0, 0, 1])
    shaping = torch.tensor([-1.0, 0.0, -7.0])
    assert group_decoupled_advantages(rewards, groups, False, shaping=shaping).tolist() == [0.0, 0.0, 0.0]


@given(pairs=episodes)
@settings(max_examples=examples(30), deadline=None)
def test_one_decoupled_reward_is_grpo_divided_by_the_std_of_the_batch(pairs):
    rewards, groups = columns(pairs)
    grpo = group_relative_advantages(rewards, groups, by_std=True)
    decoupled = group_decoupled_advantages(rewards, groups, by_std=True)
    if len(rewards) > 1 and grpo.any():
        torch.testing.assert_close(decoupled, grpo / (grpo.std() + 1e-6), atol=1e-4, rtol=1e-4)
    else:
        assert not decoupled.any()
