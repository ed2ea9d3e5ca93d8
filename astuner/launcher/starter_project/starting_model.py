"""Create the random starting model. Delete this file once `model.path` in agent.yaml names a real model."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

CONTEXT = 2048
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKUP = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


def starting_model() -> Path:
    """Return the model's folder, next to this file; create the model on first use."""
    folder = Path(__file__).parent / "starting_model"
    if not (folder / "config.json").exists():
        # The final rename is atomic, so an interrupted call leaves no incomplete model.
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".starting_model-") as temporary:
            _create(Path(temporary))
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(temporary, folder.with_suffix(".complete"), dirs_exist_ok=True)
            folder.with_suffix(".complete").rename(folder)
    return folder


def _create(folder: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = _tokenizer()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    tokenizer.save_pretrained(folder)
    Qwen3ForCausalLM(config).save_pretrained(folder)


def _tokenizer() -> Any:
    """Return a tokenizer with one token per byte, and Qwen's chat markup."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*alphabet, *SPECIAL])}
    plain = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    plain.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    # Not special, as in Qwen's tokenizers, so that decoding keeps them and tool calls can be parsed.
    tokenizer.add_tokens(MARKUP, special_tokens=False)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
