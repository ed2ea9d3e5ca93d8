"""Log-probabilities of given tokens, of padded rows and of packed ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    AttentionInterface,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from astuner.algorithms.training_rows import TrainingRow
from astuner.backbone.local.forward import micro_batches, token_logprobs
from astuner.backbone.packing import packed_attention as packed
from astuner.backbone.packing.packed_attention import PackCosts, count_pack_costs
from astuner.context_tracker.packing import Packing, encode_ids, pack_encoded, pack_separate
from tests.examples import examples


def packed_ids(sequences):
    return pack_encoded([encode_ids(sequence) for sequence in sequences])


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


def make_model(kind: str = "qwen3", **more: Any) -> Any:
    torch.manual_seed(0)
    model = MODELS[kind](**more).train()
    packed.enable_packed_attention(model)
    return model


def make_rows(shared: int, lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    """Rows that begin with `shared` equal tokens."""
    generator = torch.Generator().manual_seed(seed)
    beginning = torch.randint(1, 60, (shared,), generator=generator).tolist()
    return [(beginning + torch.randint(1, 60, (n,), generator=generator).tolist())[:n] for n in lengths]


def padded(rows: list[list[int]]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def from_column(rows: list[list[int]], column: int) -> Tensor:
    return padded([[int(at >= column) for at in range(len(row))] for row in rows])


def outcome(
    model: Any, rows: list[list[int]], selected: Tensor, packing: Packing | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities, entropies, and the gradient of a weighted sum of the former."""
    model.zero_grad()
    logprobs, entropies = token_logprobs(model, padded(rows), selected, 0.8, packing)
    # All positive: the gradients of equal rows must not cancel, as only rounding would remain.
    weights = torch.linspace(1, 2, selected.numel()).view(selected.shape) * selected
    (logprobs * weights).sum().backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    return logprobs.detach(), entropies, gradient


def assert_same(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Assert equality up to float32's rounding, for a gradient relative to its norm."""
    for actual, other in zip(got, expected, strict=True):
        assert (actual - other).norm() <= 1e-5 * (other.norm() + 0.1)


def count_tokens(model: Any, rows: list[list[int]], selected: Tensor, packing: Packing | None = None) -> int:
    """Return how many tokens the model's layers compute."""
    token_counts = []
    hook = model.get_input_embeddings().register_forward_hook(
        lambda _module, args, _output: token_counts.append(args[0].numel())
    )
    token_logprobs(model, padded(rows), selected, 1.0, packing)
    hook.remove()
    return sum(token_counts)


def test_logprobs_and_entropies_are_those_of_the_distribution():
    model = make_model().eval()
    rows = make_rows(0, (7, 7, 5))
    selected = from_column(rows, 3)
    logprobs, entropies = token_logprobs(model, padded(rows), selected, 0.8)
    logits = model(padded(rows)).logits[:, :-1] / 0.8
    expected = logits.log_softmax(-1).gather(-1, padded(rows)[:, 1:, None])[..., 0]
    torch.testing.assert_close(logprobs[:, 1:], expected * selected[:, 1:])
    assert not logprobs[:, 0].any()
    distribution = torch.distributions.Categorical(logits=logits)
    torch.testing.assert_close(entropies[:, 1:], distribution.entropy() * selected[:, 1:])


@pytest.mark.parametrize("packed_rows", [False, True])
def test_each_token_has_the_logprob_at_its_own_temperature(packed_rows: bool):
    """Rows 0 and 1 are equal, so that a packing computes the same logits for several temperatures."""
    rows = make_rows(20, (36, 36, 33, 24))
    rows[1] = rows[0]
    selected = from_column(rows, 5)
    of_rows = torch.tensor([0.5, 1.7, 1.0, 0.0])
    temperature = of_rows[:, None].repeat(1, selected.shape[1])
    temperature[2, 25:] = 0.3
    outcomes = []
    model = make_model()
    weights = torch.linspace(1, 2, selected.numel()).view(selected.shape)
    packing = packed_ids(rows) if packed_rows else None
    logprobs, entropies = token_logprobs(model, padded(rows), selected, temperature, packing)
    (logprobs * weights).sum().backward()
    outcomes.append((logprobs.detach(), entropies, model.lm_head.weight.grad.clone()))
    model.zero_grad()
    expected, expected_entropies = torch.zeros((2, *selected.shape)).unbind()
    for value in sorted(set(temperature.flatten().tolist())):
        here = selected * (temperature == value)
        alone, entropy = token_logprobs(model, padded(rows), here, value)
        (alone * weights).sum().backward()
        expected, expected_entropies = expected + alone.detach(), expected_entropies + entropy
    outcomes.append((expected, expected_entropies, model.lm_head.weight.grad.clone()))
    assert_same(*outcomes)


@pytest.mark.parametrize("kind", sorted(MODELS))
@pytest.mark.parametrize("first", [1, 12, 20, 30])
def test_packing_changes_neither_values_nor_gradients(kind: str, first: int):
    rows = make_rows(20, (36, 36, 33, 24, 40))
    selected = from_column(rows, first)
    model, packing = make_model(kind), packed_ids(rows)
    assert_same(outcome(model, rows, selected, packing), outcome(model, rows, selected))
    assert count_tokens(model, rows, selected) == 5 * 40
    assert count_tokens(model, rows, selected, packing) == len(
        {tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)}
    )


@given(rows=st.lists(st.lists(st.integers(1, 3), min_size=2, max_size=10), min_size=1, max_size=6), data=st.data())
@settings(max_examples=examples(60), deadline=None)
def test_any_rows_give_what_they_give_alone(rows: list[list[int]], data: st.DataObject):
    selected = padded([[0] + [data.draw(st.integers(0, 1)) for _ in row[1:]] for row in rows])
    if not selected.any():
        selected[0, 1] = 1
    model = make_model(initializer_range=0.1).eval()  # sure of nothing, so that gradients are no rounding
    expected = outcome(model, rows, selected)
    assert_same(outcome(model, rows, selected, packed_ids(rows)), expected)
    assert_same(outcome(model, rows, selected, pack_separate([encode_ids(row) for row in rows])), expected)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[Packing], Any]:
    """Attend by the mask that a GPU is given; return a function that does so from then on and returns the mask."""
    attend = packed._attend

    def force(packing: Packing) -> Any:
        mask = packed.ancestor_blocks(packing, torch.device("cpu"))
        attention = AttentionInterface._global_mapping
        monkeypatch.setitem(attention, "astuner_packed", lambda *a, **k: attend(*a, **(k | {"block_mask": mask})))
        return mask

    return force


ROWS = make_rows(20, (36, 36, 33, 24, 40)) + make_rows(9, (30, 20), seed=1)


def test_the_dense_mask_of_a_gpu_gives_the_same(as_on_a_gpu: Callable[[Packing], Any]):
    selected, model, packing = from_column(ROWS, 12), make_model(), packed_ids(ROWS)
    expected = outcome(model, ROWS, selected, packing)
    assert isinstance(as_on_a_gpu(packing), Tensor)
    assert_same(outcome(model, ROWS, selected, packing), expected)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_gives_the_same(as_on_a_gpu: Callable[[Packing], Any], monkeypatch: pytest.MonkeyPatch):
    """It runs uncompiled on a CPU, without a gradient."""
    selected, model, packing = from_column(ROWS, 12), make_model(), packed_ids(ROWS)
    expected, _, _ = outcome(model, ROWS, selected, packing)
    monkeypatch.setattr(packed, "_can_compile", lambda: True)
    assert not isinstance(as_on_a_gpu(packing), Tensor)
    with torch.no_grad():
        logprobs, _ = token_logprobs(model, padded(ROWS), selected, 0.8, packing)
    assert_same((logprobs,), (expected,))


def test_gradient_checkpointing_recomputes_packed_rows():
    rows = make_rows(20, (36, 30, 40))
    selected = from_column(rows, 25)
    plain, recomputing = make_model(), make_model()
    recomputing.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(outcome(recomputing, rows, selected, packed_ids(rows)), outcome(plain, rows, selected))


def test_adapters_take_packed_rows():
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    settings_ = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(make_model(), settings_)
    rows = make_rows(20, (36, 30, 40))
    selected = from_column(rows, 25)
    assert packed.supports_packing(model)
    assert_same(outcome(model, rows, selected, packed_ids(rows)), outcome(model, rows, selected))


def test_attention_in_windows_is_left_to_the_model():
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
    assert not packed.supports_packing(make_model(**windows))


def test_a_prepared_model_computes_padded_batches_as_before(tmp_path: Any):
    plain, prepared = MODELS["qwen3"]().eval(), make_model().eval()
    plain.load_state_dict(prepared.state_dict())
    rows, mask = padded(make_rows(0, (9, 9))), torch.tensor([[1] * 9, [0] * 3 + [1] * 6])
    torch.testing.assert_close(prepared(rows, attention_mask=mask).logits, plain(rows, attention_mask=mask).logits)
    prepared.save_pretrained(tmp_path)
    assert "astuner" not in (tmp_path / "config.json").read_text()


def test_costs_are_counted_and_weighed():
    model = make_model()
    config = model.config
    width, inner = config.num_attention_heads * config.head_dim, config.intermediate_size
    key_width = config.num_key_value_heads * config.head_dim
    per_layer = config.hidden_size * (2 * width + 2 * key_width + 3 * inner)
    costs = count_pack_costs(model, torch.device("cpu"))
    assert costs.per_token == 2 * config.num_hidden_layers * per_layer
    assert costs.per_pair == 4 * config.num_hidden_layers * width
    assert costs.per_batch > 0
    assert count_pack_costs(make_model(), torch.device("cpu")) == costs
    costs = PackCosts(per_token=1.0, per_pair=0.0, per_batch=10.0)
    assert costs.is_cheaper_packed(packed_ids(make_rows(20, (36, 36, 36))))
    assert not costs.is_cheaper_packed(packed_ids(make_rows(4, (12, 12, 12))))
    # 3 rows of 36 tokens, 20 of them shared, 16 queries that look at 36 keys each where they stand behind the others.
    assert PackCosts(0.0, 1.0, 0.0).of_packing(packed_ids(make_rows(20, (36, 36, 36)))) == 36 * 18 + 2 * 16 * 36
    assert PackCosts(0.0, 1.0, 0.0).of_separate_rows(packed_ids(make_rows(20, (36, 36, 36)))) == 3 * 36 * 18


def test_rows_that_begin_alike_go_together_within_the_budget():
    groups = [make_rows(20, (30, 30, 30), seed) for seed in (1, 2)]
    rows = [TrainingRow(ids, [0] * 29 + [1]) for pair in zip(*groups, strict=True) for ids in pair]
    device = torch.device("cpu")
    batches = micro_batches(rows, 50, device, lambda _: True)
    assert sorted(tuple(sorted(batch.rows)) for batch in batches) == [(0, 2, 4), (1, 3, 5)]
    assert all(batch.packing is not None and len(batch.packing.token_ids) == 50 for batch in batches)
    assert len(micro_batches(rows, 100, device, lambda _: True)) == 1
    unpacked = micro_batches(rows, 100, device, lambda _: False)
    assert [(batch.packing, len(batch.rows)) for batch in unpacked] == [(None, 3), (None, 3)]
    assert [len(batch.rows) for batch in micro_batches(rows, 30, device, lambda _: True)] == [1] * 6
