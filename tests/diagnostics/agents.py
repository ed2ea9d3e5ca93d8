"""A workflow whose tool is not reachable, and a judge that is not needed."""

from __future__ import annotations

from typing import Any

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask


class BrokenTool(Workflow):
    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        question = workflow_task.task.main_query
        function = {"name": "search", "arguments": '{"q": "' + workflow_task.task_id + '"}'}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]},
            {"role": "tool", "content": "ConnectionError: no route to host", "tool_call_id": "1", "name": "search"},
        ]
        answer = await model_tuner.chat(messages)
        return WorkflowOutput(reward=len(answer.parsed.content) / 100)
