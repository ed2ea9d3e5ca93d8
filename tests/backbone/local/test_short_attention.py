"""Attention of few tokens in bfloat16: values and gradients are those of float64 up to the rounding of bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from astuner.backbone.local.forward import token_logprobs
from astuner.backbone.packing import packed_attention as packed
from astuner.backbone.packing.packed_attention import is_short, short_attention
from astuner.context_tracker.packing import encode_ids, pack_encoded


def packed_ids(sequences):
    return pack_encoded([encode_ids(sequence) for sequence in sequences])


def difference(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize(("heads", "groups", "before"), [(6, 2, 5), (4, 4, 0), (2, 1, 60)])
def test_values_and_gradients(heads: int, groups: int, before: int):
    torch.manual_seed(0)
    queries, width = 7, 16
    shapes = [(3, heads, queries, width)] + 2 * [(3, groups, before + queries, width)]
    inputs = [torch.randn(shape, dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    mask = torch.ones(queries, before + queries, dtype=torch.bool).tril(before)
    attended = short_attention(*inputs, mask, width**-0.5)
    query, key, value = exact
    repeated = (x.repeat_interleave(heads // groups, dim=1) for x in (key, value))
    expected = torch.nn.functional.scaled_dot_product_attention(query, *repeated, attn_mask=mask)
    grad = torch.randn_like(attended)
    pairs = [(attended, expected)]
    pairs += zip(
        torch.autograd.grad(attended, inputs, grad), torch.autograd.grad(expected, exact, grad.double()), strict=True
    )
    assert max(difference(actual, other) for actual, other in pairs) < 0.006


def test_only_short_contexts_in_bfloat16():
    query = torch.zeros(1, 2, 3, 4)
    assert [is_short(query.to(dtype), 10) for dtype in (torch.float32, torch.bfloat16)] == [False, True]
    assert not is_short(query.bfloat16(), 100_000)


def test_packed_rows_have_the_gradient_of_pytorchs_kernel(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    packed.enable_packed_attention(model)
    start = list(range(1, 20))
    rows = [[*start, *(number * 7 % 60 for number in range(index, index + 9))] for index in range(4)]
    ids = torch.tensor(rows)
    selected = torch.zeros_like(ids)
    selected[:, len(start) :] = 1
    calls: list[Tensor] = []

    def gradient(dtype: torch.dtype) -> Tensor:
        model.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            logprobs, _ = token_logprobs(model, ids, selected, 0.8, packed_ids(rows))
        logprobs.sum().backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])

    def counted(query: Tensor, keys: int) -> bool:
        calls.append(query)
        return is_short(query, keys)

    monkeypatch.setattr(packed, "is_short", counted)
    short = gradient(torch.bfloat16)
    assert calls
    assert all(is_short(query, 1) for query in calls)
    monkeypatch.setattr(packed, "is_short", lambda query, keys: False)
    of_kernel, exact = gradient(torch.bfloat16), gradient(torch.float32)
    assert not torch.equal(short, of_kernel)
    assert difference(short, exact) < 1.5 * difference(of_kernel, exact)
