from __future__ import annotations

import math

import pytest
import torch

from astuner.backbone.local.algorithms import entropy_from_logits


def test_hand_worked():
    # Uniform over 4; (1/2, 1/4, 1/4): 1.5 log 2; certain.
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [2.0, 1.0, 1.0, -math.inf], [0.0, -math.inf, -math.inf, -math.inf]])
    logits[1, 0] = 1.0 + math.log(2)
    expected = [math.log(4), 1.5 * math.log(2), 0.0]
    assert entropy_from_logits(logits).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_change_nothing(dtype):
    logits = torch.randn(3, 5, 11).to(dtype).requires_grad_()
    expected = torch.distributions.Categorical(logits=logits.detach().float()).entropy()
    for chunk in (1, 4, 1000):
        entropy = entropy_from_logits(logits, chunk_tokens=chunk)
        assert not entropy.requires_grad
        torch.testing.assert_close(entropy, expected)
