"""The model and the agent of bench_scale.py: one call with a short answer."""

from __future__ import annotations

from pathlib import Path

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask


class OneAnswer(Workflow):
    """Ask the model once and score the digits of its answer."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        answer = await model_tuner.chat([{"role": "user", "content": workflow_task.task.main_query}])
        text = answer.parsed.content
        return WorkflowOutput(reward=sum(char.isdigit() for char in text) / max(len(text), 1))


def save_model(folder: Path) -> None:
    """Write a random model of 0.1 M parameters, with a tokenizer of single characters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from tutorial.tiny_tokenizer import build_tokenizer

    rows = [{"messages": [{"role": "user", "content": "What is 0123456789 + 1?"}], "tools": None}]
    tokenizer = build_tokenizer(rows, context=65_536)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=65_536,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
