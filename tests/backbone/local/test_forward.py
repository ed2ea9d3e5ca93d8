"""Log-probabilities of given tokens, with and without a beginning that is computed once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from astuner.backbone.local import shared_prefix
from astuner.backbone.local.forward import token_logprobs

SHAPE: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
MODELS = {
    "llama": lambda **more: LlamaForCausalLM(LlamaConfig(**SHAPE | more)),
    "qwen2": lambda **more: Qwen2ForCausalLM(Qwen2Config(**SHAPE | more)),
    "qwen3": lambda **more: Qwen3ForCausalLM(Qwen3Config(**SHAPE | more)),
}


def make_model(kind: str, *, enabled: bool, **more: Any) -> Any:
    torch.manual_seed(0)
    model = MODELS[kind](**more).train()
    if enabled:
        shared_prefix.enable(model)
    return model


def make_rows(shared: int, lengths: tuple[int, ...], seed: int = 0) -> Tensor:
    """Rows that begin with `shared` equal tokens, padded with 0."""
    generator = torch.Generator().manual_seed(seed)
    beginning = torch.randint(1, 60, (shared,), generator=generator)
    rows = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    for row, length in zip(rows, lengths, strict=True):
        row[:length] = torch.randint(1, 60, (length,), generator=generator)
        row[:shared] = beginning[:length]
    return rows


def outcome(model: Any, rows: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities, entropies, and the gradient of a weighted sum of the former."""
    model.zero_grad()
    logprobs, entropies = token_logprobs(model, rows, wanted, 0.8)
    weights = torch.linspace(-1, 1, rows.numel()).view(rows.shape) * wanted
    (logprobs * weights).sum().backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    return logprobs.detach() * wanted, entropies * wanted, gradient


def assert_same(got: tuple[Tensor, Tensor, Tensor], expected: tuple[Tensor, Tensor, Tensor]) -> None:
    """Assert equality but for float32's rounding, of a gradient in relation to its norm."""
    for one, other in zip(got, expected, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()


def tokens_seen(model: Any, rows: Tensor, wanted: Tensor) -> int:
    """Return how many tokens the model's layers compute."""
    seen = []
    hook = model.get_input_embeddings().register_forward_hook(
        lambda _module, args, _output: seen.append(args[0].numel())
    )
    token_logprobs(model, rows, wanted, 1.0)
    hook.remove()
    return sum(seen)


def from_column(rows: Tensor, column: int) -> Tensor:
    wanted = torch.zeros_like(rows)
    wanted[:, column:] = 1
    return wanted * rows.ne(0)


def test_logprobs_and_entropies_are_those_of_the_distribution():
    model = make_model("qwen3", enabled=False).eval()
    rows = make_rows(0, (7, 7, 5))
    logprobs, entropies = token_logprobs(model, rows, from_column(rows, 3), 0.8)
    logits = model(rows).logits[:, :-1] / 0.8
    expected = logits.log_softmax(-1).gather(-1, rows[:, 1:, None])[..., 0]
    torch.testing.assert_close(logprobs[:, 3:], expected[:, 2:])
    assert not logprobs[:, :3].any()
    distribution = torch.distributions.Categorical(logits=logits)
    torch.testing.assert_close(entropies[:, 3:], distribution.entropy()[:, 2:])


@pytest.mark.parametrize("kind", sorted(MODELS))
@pytest.mark.parametrize("first", [1, 12, 20, 30])
def test_a_shared_beginning_changes_neither_values_nor_gradients(kind: str, first: int):
    rows = make_rows(20, (36, 36, 33, 24, 40))
    wanted = from_column(rows, first)
    plain, shared = (make_model(kind, enabled=enabled) for enabled in (False, True))
    assert_same(outcome(shared, rows, wanted), outcome(plain, rows, wanted))
    assert tokens_seen(plain, rows, wanted) == 5 * 40
    assert tokens_seen(shared, rows, wanted) == 19 + 5 * 21


@given(
    shared=st.integers(0, 12),
    more=st.lists(st.integers(0, 8), min_size=1, max_size=5),
    first=st.integers(1, 12),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_any_rows_give_what_they_give_alone(shared: int, more: list[int], first: int, seed: int):
    rows = make_rows(shared, tuple(max(shared + extra, 2) for extra in more), seed)
    wanted = from_column(rows, first)
    model = make_model("qwen3", enabled=True).eval()
    together, _ = token_logprobs(model, rows, wanted, 1.0)
    alone = torch.cat([token_logprobs(model, rows[i : i + 1], wanted[i : i + 1], 1.0)[0] for i in range(len(rows))])
    torch.testing.assert_close(together * wanted, alone * wanted, rtol=1e-4, atol=1e-5)


def test_gradient_checkpointing_recomputes_shared_beginnings():
    rows = make_rows(20, (36, 30, 40))
    wanted = from_column(rows, 25)
    plain, shared = (make_model("qwen3", enabled=enabled) for enabled in (False, True))
    shared.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(outcome(shared, rows, wanted), outcome(plain, rows, wanted))


def test_adapters_take_shared_beginnings():
    from peft import LoraConfig, get_peft_model

    def adapted(*, enabled: bool) -> Any:
        torch.manual_seed(1)
        settings_ = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
        return get_peft_model(make_model("qwen3", enabled=enabled), settings_)

    rows = make_rows(20, (36, 30, 40))
    wanted = from_column(rows, 25)
    plain, shared = adapted(enabled=False), adapted(enabled=True)
    assert_same(outcome(shared, rows, wanted), outcome(plain, rows, wanted))
    assert tokens_seen(shared, rows, wanted) < tokens_seen(plain, rows, wanted)


def test_a_short_beginning_of_long_rows_is_not_worth_the_detour():
    model = make_model("qwen3", enabled=True)
    rows = make_rows(4, (120, 120))
    assert tokens_seen(model, rows, from_column(rows, 60)) == 2 * 120


def test_attention_in_windows_is_left_to_the_model():
    model = make_model("qwen3", enabled=True, use_sliding_window=True, sliding_window=8, max_window_layers=0)
    rows = make_rows(20, (36, 36))
    assert tokens_seen(model, rows, from_column(rows, 25)) == 2 * 36


def test_a_prepared_model_computes_padded_batches_as_before(tmp_path: Any):
    plain, shared = (make_model("qwen3", enabled=enabled).eval() for enabled in (False, True))
    rows, mask = make_rows(0, (9, 9)), torch.tensor([[1] * 9, [0] * 3 + [1] * 6])
    torch.testing.assert_close(shared(rows, attention_mask=mask).logits, plain(rows, attention_mask=mask).logits)
    shared.save_pretrained(tmp_path)
    assert "astuner" not in (tmp_path / "config.json").read_text()
