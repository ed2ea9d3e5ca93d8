"""The agent that astuner trains in bench_step.py."""

from __future__ import annotations

import time

import step_task

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask


class OneAnswer(Workflow):
    """Ask the model once and score its answer."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        answer = await model_tuner.chat(step_task.messages(workflow_task.task.main_query))
        reward = step_task.reward(answer.parsed.content)
        return WorkflowOutput(reward=reward, metadata={"rewarded_at": time.time()})
