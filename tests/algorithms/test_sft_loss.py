from __future__ import annotations

import pytest
import torch

from astuner.algorithms.aggregate import cross_entropy_losses, sample_scales, sft_token_weights, token_weights

TRAIN_COUNTS = torch.tensor([[0, 0, 1, 1], [0, 1, 0, 0], [1, 0, 1, 0]])
# The first row is full, the second is padded on the right, the third on the left.
PRESENT = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [0, 1, 1, 1]])


def test_weights_hand_worked():
    expected = [[0, 0.5, 1, 1], [0, 1, 0.5, 0], [0, 0, 1, 0.5]]
    assert sft_token_weights(TRAIN_COUNTS, PRESENT, 0.5).tolist() == expected
    without_prompt = [[0, 0, 1, 1], [0, 1, 0, 0], [0, 0, 1, 0]]
    assert sft_token_weights(TRAIN_COUNTS, PRESENT, 0.0).tolist() == without_prompt


def sft_loss(logprobs, weights, episodes):
    scales = sample_scales(weights.sum(dim=1), episodes, "token-mean", max_response_length=10)
    return (cross_entropy_losses(logprobs, weights) * token_weights(weights, scales)).sum()


def test_loss_hand_worked():
    logprobs = torch.tensor([[-9.0, -1.0, -2.0, -3.0], [-9.0, -0.5, -4.0, -9.0], [-9.0, -9.0, -1.0, -2.0]])
    weights = sft_token_weights(TRAIN_COUNTS, PRESENT, 0.5)
    # (0.5 × 1 + 2 + 3  +  0.5 + 0.5 × 4  +  1 + 0.5 × 2) / (2.5 + 1.5 + 1.5) = 10 / 5.5
    assert float(sft_loss(logprobs, weights, torch.arange(3))) == pytest.approx(10 / 5.5)


def test_is_torch_cross_entropy_and_its_gradient():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 7, (2, 5), generator=generator)
    train_counts = torch.tensor([[0, 1, 1, 0, 1], [0, 0, 1, 1, 0]])
    weights = sft_token_weights(train_counts, torch.ones_like(train_counts), 0.0)
    logprobs = torch.log_softmax(logits, dim=-1).gather(-1, targets[..., None])[..., 0]
    loss = sft_loss(logprobs, weights, torch.tensor([0, 1]))
    reference = torch.nn.functional.cross_entropy(logits[train_counts > 0], targets[train_counts > 0])
    torch.testing.assert_close(loss, reference, rtol=1e-6, atol=0)
    (gradient,) = torch.autograd.grad(loss, logits)
    (expected,) = torch.autograd.grad(reference, logits)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-8)


def test_a_masked_token_may_be_impossible():
    logprobs = torch.tensor([[float("-inf"), -1.0]], requires_grad=True)
    losses = cross_entropy_losses(logprobs, torch.tensor([[0.0, 1.0]]))
    losses.sum().backward()
    assert losses.tolist() == [[0.0, 1.0]]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[0.0, -1.0]]
