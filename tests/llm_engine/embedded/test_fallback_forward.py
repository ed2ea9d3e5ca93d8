from __future__ import annotations

import pytest
import torch

from astuner.llm_engine.embedded.fallback_forward import CachedFallback, UncachedFallback, fallback_forward

from .test_fast_forward import expected_logits, logits_in_pieces
from .tiny_models import gemma2, gpt2, gpt_neox, llama, mamba, opt, qwen3, random_prompt


@pytest.mark.parametrize(
    "make",
    [
        gpt_neox,
        gemma2,
        gpt2,
        opt,
        qwen3,
        lambda: llama(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
    ],
    ids=["gpt_neox", "gemma2 with a sliding window", "gpt2", "opt", "qwen3", "llama"],
)
def test_computes_what_transformers_computes(make):
    model = make()
    forward = fallback_forward(model)
    assert isinstance(forward, CachedFallback)
    sequences = [random_prompt(length, seed=length) for length in (1, 33, 9, 50, 2, 17)]
    logits = logits_in_pieces(forward, sequences, [0, 5, 11, 60])
    expected = expected_logits(model, sequences)
    assert expected.std() > 0.1
    assert (logits - expected).abs().max() < 1e-5 * max(1.0, float(expected.abs().max()))


def test_a_recurrent_model_is_computed_without_a_cache():
    model = mamba()
    forward = fallback_forward(model)
    assert isinstance(forward, UncachedFallback)
    sequences = [random_prompt(length, seed=length) for length in (1, 9, 5)]
    logits = logits_in_pieces(forward, sequences, [0, 60])
    assert (logits - expected_logits(model, sequences)).abs().max() < 1e-5


def test_dropout_is_off():
    model = gpt2()
    model.train()
    forward = fallback_forward(model)
    sequences = [random_prompt(9), random_prompt(12)]
    first, again = (logits_in_pieces(forward, sequences, [0, 60]) for _ in range(2))
    assert torch.equal(first, again)


def test_load_writes_into_the_model():
    model, other = gpt2(), gpt2(seed=1)
    forward = fallback_forward(model)
    forward.load(other.state_dict())
    sequences = [random_prompt(9), random_prompt(12)]
    logits = logits_in_pieces(forward, sequences, [0, 60])
    assert (logits - expected_logits(other, sequences)).abs().max() < 1e-5
    assert model.lm_head.weight is model.transformer.wte.weight
