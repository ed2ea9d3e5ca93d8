from __future__ import annotations

import math

import pytest
import torch

from astuner.algorithms import entropy, entropy_from_logprobs


def test_hand_worked():
    # Uniform over 4; (1/2, 1/4, 1/4): 1.5 log 2; certain.
    chances = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.5, 0.25, 0.25, 0.0], [1.0, 0.0, 0.0, 0.0]])
    expected = [math.log(4), 1.5 * math.log(2), 0.0]
    assert entropy_from_logprobs(chances.log()).tolist() == pytest.approx(expected)


def test_chunks_change_nothing(monkeypatch):
    logprobs = torch.randn(3, 5, 11).log_softmax(dim=-1).requires_grad_()
    expected = torch.distributions.Categorical(logits=logprobs.detach()).entropy()
    for elements in (1, 4 * 11, 1000):
        monkeypatch.setattr(entropy, "_CHUNK_ELEMENTS", elements)
        result = entropy_from_logprobs(logprobs)
        assert not result.requires_grad
        torch.testing.assert_close(result, expected)
