"""Models whose rotary frequencies depend on the length of a sequence."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, Phi3Config, Phi3ForCausalLM, PreTrainedModel

from astuner.backbone.local.forward import token_logprobs
from astuner.errors import ModelError
from astuner.llm_engine.context_length import check_context_length, context_length
from astuner.llm_engine.embedded.engine import EmbeddedEngine
from astuner.schema import SamplingParams
from tests.llm_engine.embedded.tiny_models import llama, random_prompt

LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [7.0] * 8}
SWITCH = 48


def phi3(positions: int = 512, switch: int = SWITCH) -> PreTrainedModel:
    """A tiny model of the shape of Phi-3-128k."""
    torch.manual_seed(0)
    config = Phi3Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=positions,
        original_max_position_embeddings=switch,
        rope_parameters=dict(LONGROPE),
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return Phi3ForCausalLM(config).eval()


def logprobs_of(model: PreTrainedModel, prompt: list[int], completion: tuple[int, ...]) -> list[float]:
    """transformers' logprobs of a completion, computed as a sequence by itself."""
    ids = torch.tensor([[*prompt, *completion]])
    with torch.no_grad():
        logprobs = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
    return [float(logprobs[len(prompt) + i - 1, token]) for i, token in enumerate(completion)]


def dynamic_llama() -> PreTrainedModel:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    return llama(max_position_embeddings=SWITCH, rope_parameters=rope)


@pytest.mark.parametrize("make", [phi3, dynamic_llama])
async def test_engine_and_trainer_agree_up_to_the_length_at_which_frequencies_change(make: Any) -> None:
    engine = EmbeddedEngine(make(), max_model_len=400)
    try:
        assert engine.max_model_len == SWITCH
        reference, prompt = make(), random_prompt(5)
        grown = await engine.generate(prompt, SamplingParams(max_tokens=400, seed=1))
        assert len(prompt) + len(grown.token_ids) == SWITCH
        again = await engine.generate(prompt, SamplingParams(max_tokens=4, seed=2))
        for completion in (grown, again):
            expected = logprobs_of(reference, prompt, completion.token_ids)
            assert list(completion.logprobs) == pytest.approx(expected, abs=1e-4)
    finally:
        engine.close()


@pytest.mark.parametrize("make", [phi3, dynamic_llama])
def test_a_short_row_is_computed_alike_beside_the_longest_row(make: Any) -> None:
    model = make()
    short, long = random_prompt(12, 1), random_prompt(SWITCH, 2)
    rows = torch.tensor([short + [0] * (SWITCH - 12), long])
    mask = torch.zeros_like(rows)
    mask[0, 5:12] = mask[1, 5:] = 1
    with torch.no_grad():
        together, _ = token_logprobs(model, rows, mask, 1.0)
        alone, _ = token_logprobs(model, torch.tensor([short]), mask[:1, :12], 1.0)
    assert together[0, :12].tolist() == pytest.approx(alone[0].tolist(), abs=1e-5)


def test_context_length_of_configurations() -> None:
    assert context_length(phi3().config) == SWITCH
    assert context_length(llama(max_position_embeddings=64).config) == 64
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    assert context_length(llama(max_position_embeddings=64, rope_parameters=yarn).config) == 64
    mistral = llama(max_position_embeddings=256)
    mistral.config.rope_parameters = {
        "full_attention": LONGROPE | {"original_max_position_embeddings": 32},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert context_length(mistral.config) == 32


def test_a_run_that_could_exceed_the_length_is_rejected(tmp_path: Path, tokenizer: Any) -> None:
    folder = tmp_path / "phi"
    phi3().save_pretrained(folder)
    check_context_length(str(folder), SWITCH)
    with pytest.raises(ModelError, match=rf"longrope.* Set rollout\.max_model_len: {SWITCH}, or use"):
        check_context_length(str(folder), SWITCH + 1)
    # Without positions beyond the length, sequences end before it.
    limited = tmp_path / "limited"
    phi3(positions=SWITCH).save_pretrained(limited)
    assert AutoConfig.from_pretrained(limited).rope_parameters["rope_type"] == "longrope"
    check_context_length(str(limited), 18_000)
    # The weights are loaded later, and a folder without a configuration is reported then.
    shutil.rmtree(limited)
    check_context_length(str(limited), 18_000)
