"""The agent that bench_memory.py trains: its answers are as long as allowed, and their rewards differ."""

from __future__ import annotations

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask


class Storyteller(Workflow):
    """Ask for a story and count its letters."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        answer = await model_tuner.chat([{"role": "user", "content": workflow_task.task.main_query}])
        text = answer.parsed.content
        return WorkflowOutput(reward=sum(letter in "aeiou" for letter in text) / max(len(text), 1))
