"""The estimate of a run's memory agrees with the model that is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from astuner.backbone.training.memory_estimate import model_shape
from astuner.config.root import AstunerConfig


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_the_loaded_model(tmp_path: Path, tied: bool):
    config = Qwen3Config(
        vocab_size=97,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=tied,
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model_shape(AstunerConfig(), str(tmp_path)).parameters == sum(p.numel() for p in model.parameters())
