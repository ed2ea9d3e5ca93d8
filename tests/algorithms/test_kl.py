from __future__ import annotations

import math

import pytest
import torch

from astuner.algorithms.kl import K3_LIMIT, LOG_RATIO_LIMIT, token_kl

KINDS = ["k1", "k2", "low_var_kl"]

# A policy over three tokens and its reference, for exact expectations.
POLICY_LOGITS = [0.3, -0.7, 0.1]
REFERENCE = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # d = log 2 and d = -log 2
        ("k1", [0.693147, -0.693147]),
        ("k2", [0.240227, 0.240227]),
        # 1/2 - 1 + log 2 and 2 - 1 - log 2
        ("low_var_kl", [0.193147, 0.306853]),
    ],
)
def test_hand_worked(kind, expected):
    logprobs = torch.log(torch.tensor([0.5, 0.25]))
    reference = torch.log(torch.tensor([0.25, 0.5]))
    assert token_kl(logprobs, reference, kind).tolist() == pytest.approx(expected, abs=1e-6)
    assert token_kl(logprobs, logprobs, kind).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("kind", ["k1", "low_var_kl"])
def test_expectation_is_the_kl(kind):
    policy = torch.log_softmax(torch.tensor(POLICY_LOGITS, dtype=torch.float64), dim=0)
    exact = float((policy.exp() * (policy - REFERENCE)).sum())
    assert float((policy.exp() * token_kl(policy, REFERENCE, kind)).sum()) == pytest.approx(exact)


def kl_gradient(kl) -> torch.Tensor:
    logits = torch.tensor(POLICY_LOGITS, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(kl(torch.log_softmax(logits, dim=0)), logits)
    return gradient


@pytest.mark.parametrize(
    ("kind", "exact"),
    [
        ("k1", lambda policy: policy.sum() * 0),
        ("k2", lambda policy: (policy.exp() * (policy - REFERENCE)).sum()),
        ("low_var_kl", lambda policy: (REFERENCE.exp() * (REFERENCE - policy)).sum()),
    ],
)
def test_expected_gradient(kind, exact):
    # The expectation is over tokens sampled from the policy, whose probabilities carry no gradient.
    estimate = kl_gradient(lambda policy: (policy.exp().detach() * token_kl(policy, REFERENCE, kind)).sum())
    torch.testing.assert_close(estimate, kl_gradient(exact))


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind):
    logprobs = torch.tensor([-1.0, -2.5, -0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.5, -0.5, -0.1], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: token_kl(x, reference, kind), logprobs)


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_values_are_finite_and_have_no_gradient(kind):
    logprobs = torch.tensor([-500.0, -0.01], requires_grad=True)
    kl = token_kl(logprobs, torch.tensor([-0.01, -500.0]), kind)
    kl.sum().backward()
    assert torch.isfinite(kl).all()
    assert float(kl.detach().abs().max()) <= math.exp(LOG_RATIO_LIMIT) * 1.001
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0, 0.0]


def test_k3_is_limited():
    # d = -3: e^3 - 1 - 3 = 16.1, above the limit, without gradient; d = 3: e^-3 - 1 + 3 = 2.05.
    logprobs = torch.tensor([-4.0, -1.0], requires_grad=True)
    kl = token_kl(logprobs, torch.tensor([-1.0, -4.0]), "low_var_kl")
    assert kl.tolist() == pytest.approx([K3_LIMIT, math.exp(-3) + 2])
    kl.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, 1 - math.exp(-3)])


def test_small_differences_are_accurate():
    # d = 1e-3: d² / 2 - d³ / 6 = 4.998e-7; exp(-d) - 1 + d in float32 would be off by a tenth of that.
    kl = token_kl(torch.tensor([1e-3]), torch.tensor([0.0]), "low_var_kl")
    assert float(kl) == pytest.approx(4.99833e-7, rel=1e-3)


def test_the_reference_gets_no_gradient():
    reference = torch.tensor([-1.0], requires_grad=True)
    assert not token_kl(torch.tensor([-2.0]), reference, "k2").requires_grad
