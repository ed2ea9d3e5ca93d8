"""An agent whose moves are drawn from the episode's place, so that every backbone runs the same script."""

from __future__ import annotations

import random

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask


class Scripted(Workflow):
    """Make two to five calls that continue, restart, drop a turn or rewrite a turn, for merging, bridging and forks."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        task = workflow_task.task
        script = random.Random(f"{task.main_query}/{workflow_task.repeat_index}")
        messages = [{"role": "user", "content": task.main_query}]
        answers = ""
        for turn in range(script.randrange(2, 6)):
            answer = await model_tuner.chat(messages)
            answers += answer.parsed.content
            move = script.choice(["continue", "continue", "restart", "drop", "rewrite"])
            messages.append({"role": "assistant", "content": answer.parsed.content})
            if move == "restart":
                messages = [{"role": "user", "content": f"{task.main_query} {turn}"}]
                continue
            if move == "drop" and len(messages) > 2:
                del messages[1:-1]
            if move == "rewrite":
                messages[-1] = {"role": "assistant", "content": f"summary {turn}"}
            messages.append({"role": script.choice(["user", "tool"]), "content": f"more {script.randrange(100)}"})
        return WorkflowOutput(
            reward=script.random(), is_success=bool(answers), log_metrics={"characters": len(answers)}
        )
