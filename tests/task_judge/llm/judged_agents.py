"""An agent whose episodes an LLM judges."""

from __future__ import annotations

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask


class Answers(Workflow):
    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        answer = await model_tuner.chat([{"role": "user", "content": workflow_task.task.main_query}])
        return WorkflowOutput(metadata={"final_answer": answer.parsed.content})
