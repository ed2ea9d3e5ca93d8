"""The agent of the campaigns, whose runs are serial and therefore reproducible."""

from __future__ import annotations

import asyncio

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask

_PAUSE = 4.0


class TwoTurns(Workflow):
    """Two turns; the reward is the share of letters in what the model says."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        messages = [{"role": "user", "content": workflow_task.task.main_query}]
        said = ""
        for _ in range(2):
            text = (await model_tuner.chat(messages)).parsed.content
            said += text
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
        share = sum(char.isalpha() for char in said) / max(len(said), 1)
        return WorkflowOutput(reward=share, is_success=share > 0.5)


class Letters(Workflow):
    """One turn; the reward is the share of letters in the answer, and success is a share of 70% or more."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        answer = await model_tuner.chat([{"role": "user", "content": workflow_task.task.main_query}])
        text = answer.parsed.content
        share = sum(map(str.isalpha, text)) / max(len(text), 1)
        return WorkflowOutput(reward=share, is_success=share >= 0.7)


class SlowTwoTurns(TwoTurns):
    """Waits between the start of an episode and its turns, so that a campaign can act in the midst of a rollout."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        await asyncio.sleep(_PAUSE)
        return await super().execute(workflow_task, model_tuner)
