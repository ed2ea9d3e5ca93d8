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
    from conftest import saved_model

    from tutorial.tiny_tokenizer import build_tokenizer

    rows = [{"messages": [{"role": "user", "content": "What is 0123456789 + 1?"}], "tools": None}]
    saved_model(build_tokenizer(rows, context=65_536), folder, hidden_size=64, head_dim=32, context=65_536)
