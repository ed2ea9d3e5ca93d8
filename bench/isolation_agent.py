"""The agent of `bench_isolation.py`: two LLM calls."""

from __future__ import annotations

import os

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask


class TwoCalls(Workflow):
    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        messages = [{"role": "user", "content": workflow_task.task.main_query}]
        for _ in range(2):
            answer = await model_tuner.chat(messages)
            messages += [{"role": "assistant", "content": answer.parsed.content}, {"role": "user", "content": "go on"}]
        return WorkflowOutput(reward=1.0, metadata={"pid": os.getpid()})
