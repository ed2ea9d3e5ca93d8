"""An agent for AppWorld. It writes Python code, sees what the code printed, and so on until the task is done."""

from __future__ import annotations

import re

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask

_CODE = re.compile(r"```(?:python|py)?\s*\n(.*?)```", re.DOTALL)
_NO_CODE = "Your answer has no code block. Write one block of Python code between ```python and ```."
_MAX_CHARACTERS = 4000


class ExampleAgentScopeLearnProtocol(Workflow):
    """Plays one task. The environment scores it: `EnvServiceJudge` is the judge."""

    max_turns = 20

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        env = workflow_task.env
        assert env is not None, "set task_reader.type: env_service"
        messages = [{"role": "user", "content": workflow_task.main_query}]
        for _ in range(self.max_turns):
            answer = await model_tuner.chat(messages)
            text = answer.text
            blocks = _CODE.findall(text)
            if blocks:
                result = await env.step(blocks[-1])
                if result.is_done:
                    break
                printed = result.observation.text[:_MAX_CHARACTERS]
            else:
                printed = _NO_CODE
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": printed}]
        return WorkflowOutput(metadata={"turns": len(env.steps)})
