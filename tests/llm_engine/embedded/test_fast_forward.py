from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from transformers import Qwen3ForCausalLM

from astuner.llm_engine import cpu_linear
from astuner.llm_engine.embedded import fast_forward
from astuner.llm_engine.embedded.fast_forward import FastForward, supports
from astuner.llm_engine.embedded.forward import LaneGroup, PrefillChunk

from .tiny_models import gemma2, llama, qwen2, qwen3, random_prompt

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512}
MODELS = {
    "qwen3": qwen3,
    "qwen3, untied, attention bias": lambda: qwen3(tie_word_embeddings=False, attention_bias=True),
    "qwen2": qwen2,
    "qwen2, tied, no grouped heads": lambda: qwen2(tie_word_embeddings=True, num_key_value_heads=4),
    "llama": llama,
    "llama, no biases": lambda: llama(attention_bias=False, mlp_bias=False),
    "llama, linear rope": lambda: llama(rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}),
    "llama, llama3 rope": lambda: llama(rope_parameters=LLAMA3_ROPE),
    "llama, yarn rope": lambda: llama(rope_parameters=YARN_ROPE),
}


@torch.inference_mode()
def logits_in_pieces(forward, sequences, cuts, shared=0):
    """Return the last logits of each sequence, computed in chunks, in two lane groups of different capacity.

    The sequences of each group have a common prefix of `shared` tokens.
    """
    shape = forward.kv_shape
    half = len(sequences) // 2
    groups = []
    for part, capacity in ((sequences[:half], 64), (sequences[half:], 96)):
        kv = torch.zeros(shape.planes, len(part), shape.heads, capacity, shape.width, dtype=shape.dtype)
        groups.append(LaneGroup(kv, part, shared))
    for start, stop in pairwise(cuts):
        chunks = [
            PrefillChunk(group.kv[:, lane], ids[start : min(stop, len(ids) - 1)], start)
            for group in groups
            for lane, ids in enumerate(group.sequences)
            if start < len(ids) - 1
        ]
        forward.extend(chunks)
    return forward.decode(groups)


@torch.no_grad()
def expected_logits(model, sequences):
    return torch.stack([model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1] for ids in sequences])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("weights", ["packed", "fused", "in place", "in place, oneDNN"])
def test_computes_what_transformers_computes(name, weights, monkeypatch):
    if "in place" in weights:
        monkeypatch.setattr(fast_forward, "_FUSE_PARAMETERS", 0)
    if weights in ("packed", "in place, oneDNN"):
        monkeypatch.setattr(cpu_linear, "_MIN_ELEMENTS", 0)
    model = MODELS[name]()
    assert supports(model)
    forward = FastForward(model, 128)
    sequences = [random_prompt(length, seed=length) for length in (1, 33, 9, 50, 2, 17)]
    logits = logits_in_pieces(forward, sequences, [0, 5, 11, 60])
    expected = expected_logits(model, sequences)
    assert expected.std() > 0.3
    assert (logits - expected).abs().max() < 1e-5 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("name", ["qwen3", "qwen2, tied, no grouped heads", "llama"])
def test_a_shared_prefix_is_read_from_the_first_lane(name):
    model = MODELS[name]()
    forward = FastForward(model, 128)
    sequences = [random_prompt(20, seed=0) + random_prompt(length, seed=length) for length in (1, 33, 9, 40, 2, 17)]
    logits = logits_in_pieces(forward, sequences, [0, 60], shared=20)
    expected = expected_logits(model, sequences)
    assert (logits - expected).abs().max() < 1e-5 * max(1.0, float(expected.abs().max()))
    # Only the first lane is read, so that the result is wrong if the other prefixes differ.
    wrong = [sequences[0], *(random_prompt(20, seed=1) + ids[20:] for ids in sequences[1:])]
    assert (logits_in_pieces(forward, wrong, [0, 60], shared=20) - expected_logits(model, wrong)).abs().max() > 1e-2


def test_bfloat16_is_close():
    model = qwen3().to(torch.bfloat16)
    forward = FastForward(model, 128)
    sequences = [random_prompt(length, seed=length) for length in (30, 8)]
    logits = logits_in_pieces(forward, sequences, [0, 60])
    expected = expected_logits(model.float(), sequences)
    assert logits.dtype == torch.float32
    assert (logits - expected).abs().mean() < 0.05 * expected.std()


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "in place"])
def test_load(fused, monkeypatch):
    if not fused:
        monkeypatch.setattr(fast_forward, "_FUSE_PARAMETERS", 0)
    model, other = qwen3(), qwen3(seed=1)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    forward = FastForward(model, 128)
    new = dict(other.state_dict())
    forward.load(new)
    sequences = [random_prompt(9), random_prompt(20)]
    logits = logits_in_pieces(forward, sequences, [0, 60])
    assert (logits - expected_logits(other, sequences)).abs().max() < 1e-4
    untouched = all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert untouched == fused
    # The weights are copied: a trainer may change its own later.
    with torch.no_grad():
        for weight in new.values():
            weight.zero_()
    assert torch.equal(logits, logits_in_pieces(forward, sequences, [0, 60]))


class Tweaked(Qwen3ForCausalLM):
    """A subclass, whose forward pass may differ from that of Qwen3."""


def test_rejects_unsupported_models():
    assert not supports(gemma2())
    assert not supports(Tweaked(qwen3().config))
    assert not supports(llama(hidden_act="gelu"))
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    assert not supports(llama(rope_parameters=dynamic))
    assert not supports(qwen2(use_sliding_window=True, sliding_window=8, max_window_layers=0))
    adapted = qwen3()
    adapted.model.layers[0].mlp.up_proj.lora_a = torch.nn.Linear(2, 2)
    assert not supports(adapted)
