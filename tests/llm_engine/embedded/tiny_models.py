"""Tiny random models, and reference logprobs computed by transformers."""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 97
POSITIONS = 2048
# Large enough that the next token clearly depends on the previous ones.
_INIT = {"initializer_range": 0.15, "vocab_size": VOCAB, "max_position_embeddings": POSITIONS}
_LLAMA_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    **_INIT,
}


def _random_weights(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Randomise biases and norms, whose initial zeros and ones would hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "A_log" not in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model.eval()


def qwen3(seed: int = 0, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(seed)
    options = {**_LLAMA_SHAPE, "head_dim": 16, "tie_word_embeddings": True, **changes}
    return _random_weights(Qwen3ForCausalLM(Qwen3Config(**options)), seed)


def qwen2(seed: int = 0, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(seed)
    return _random_weights(Qwen2ForCausalLM(Qwen2Config(**{**_LLAMA_SHAPE, **changes})), seed)


def llama(seed: int = 0, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(seed)
    options = {**_LLAMA_SHAPE, "attention_bias": True, "mlp_bias": True, **changes}
    return _random_weights(LlamaForCausalLM(LlamaConfig(**options)), seed)


def gpt_neox(seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    return _random_weights(GPTNeoXForCausalLM(GPTNeoXConfig(**shape, **_INIT)), seed)


def gemma2(seed: int = 0, sliding_window: int = 6) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = Gemma2Config(**{**_LLAMA_SHAPE, "head_dim": 16, "sliding_window": sliding_window})
    return _random_weights(Gemma2ForCausalLM(config), seed)


def gpt2(seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = GPT2Config(vocab_size=VOCAB, n_positions=300, n_embd=32, n_layer=2, n_head=2, initializer_range=0.15)
    return _random_weights(GPT2LMHeadModel(config), seed)


def opt(seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = OPTConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=300,
        word_embed_proj_dim=32,
        init_std=0.15,
    )
    return _random_weights(OPTForCausalLM(config), seed)


def mamba(seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = MambaConfig(vocab_size=VOCAB, hidden_size=32, state_size=4, num_hidden_layers=2, initializer_range=0.15)
    return _random_weights(MambaForCausalLM(config), seed)


def random_prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


@torch.no_grad()
def model_logprobs(
    model: PreTrainedModel, prompt: list[int], sampled: tuple[int, ...], temperature: float = 1.0
) -> torch.Tensor:
    """Return the logprobs of `sampled`, by transformers' forward pass on the whole sequence without a cache."""
    ids = torch.tensor([[*prompt, *sampled]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(sampled)[:, None])[:, 0]


def assert_exact(
    model: PreTrainedModel,
    prompt: list[int],
    sampled: tuple[int, ...],
    logprobs: tuple[float, ...],
    temperature: float = 1.0,
    tolerance: float = 1e-5,
) -> None:
    expected = model_logprobs(model, prompt, sampled, temperature)
    assert len(logprobs) == len(sampled) > 0
    assert (torch.tensor(logprobs) - expected).abs().max() < tolerance
