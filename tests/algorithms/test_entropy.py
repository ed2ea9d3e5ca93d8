from __future__ import annotations

import math

import pytest
import torch

from astuner.algorithms import kl
from astuner.algorithms.kl import differentiable_entropy, entropy_from_logprobs, high_entropy_threshold


def test_hand_worked():
    # Uniform over 4; (1/2, 1/4, 1/4): 1.5 log 2; certain.
    chances = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.5, 0.25, 0.25, 0.0], [1.0, 0.0, 0.0, 0.0]])
    expected = [math.log(4), 1.5 * math.log(2), 0.0]
    assert entropy_from_logprobs(chances.log()).tolist() == pytest.approx(expected)


def test_chunks_change_nothing(monkeypatch):
    logprobs = torch.randn(3, 5, 11).log_softmax(dim=-1).requires_grad_()
    expected = torch.distributions.Categorical(logits=logprobs.detach()).entropy()
    for elements in (1, 4 * 11, 1000):
        monkeypatch.setattr(kl, "_CHUNK_ELEMENTS", elements)
        result = entropy_from_logprobs(logprobs)
        assert not result.requires_grad
        torch.testing.assert_close(result, expected)


def test_the_differentiable_entropy_has_the_gradient_of_the_definition():
    logits = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(-1)
    torch.testing.assert_close(differentiable_entropy(logprobs), entropy_from_logprobs(logprobs))
    assert torch.autograd.gradcheck(lambda values: differentiable_entropy(values.log_softmax(-1)), logits)


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.2, 2.5), (0.05, 2.5), (0.4, 1.5), (0.6, 0.75), (0.8, 0.75), (1.0, -math.inf), (0.99, -math.inf)],
)
def test_threshold_selects_the_share_with_the_highest_entropy(share, expected):
    # Five trained tokens: 3, 2, 1 (twice) and 0.5; the token with a count of 0 is context.
    entropies, counts = torch.tensor([[1.0, 3.0, 9.0], [0.5, 2.0, 9.0]]), torch.tensor([[2, 1, 0], [1, 1, 0]])
    assert high_entropy_threshold(entropies, counts, share) == expected


def test_tokens_of_equal_entropy_are_all_selected():
    assert high_entropy_threshold(torch.full((2, 5), 0.7), torch.ones((2, 5), dtype=torch.int64), 0.2) == -math.inf
