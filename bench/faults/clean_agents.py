"""Ordinary workflows and judges of the clean runs, from easy to hopeless tasks."""

from __future__ import annotations

import re
from typing import Any

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask
from astuner.task_judge.judge_base import BaseJudge
from bench.faults.agents import TOOLS, Math, printed


class Letters(Workflow):
    """One turn; the reward is the share of letters in the answer, a continuous number."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        answer = await model_tuner.chat([{"role": "user", "content": workflow_task.task.main_query}])
        text = answer.parsed.content
        share = sum(map(str.isalpha, text)) / max(len(text), 1)
        return WorkflowOutput(reward=share, is_success=share > 0.5, metadata={"characters": len(text)})


class Debate(Workflow):
    """Two agents with their own system prompts and rewards; the second sees the answer of the first."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        question = workflow_task.task.main_query
        proposer, critic = model_tuner.for_agent("proposer"), model_tuner.for_agent("critic")
        first = await proposer.chat(
            [{"role": "system", "content": "Propose an answer."}, {"role": "user", "content": question}]
        )
        second = await critic.chat(
            [
                {"role": "system", "content": "Criticise the answer."},
                {"role": "user", "content": f"{question}\n{first.parsed.content}"},
            ]
        )
        lengths = [len(first.parsed.content), len(second.parsed.content)]
        return WorkflowOutput(
            reward={"proposer": float(lengths[0] % 3 == 0), "critic": 1.0 / (1 + lengths[1])}, is_success=lengths[0] > 9
        )


class Forgetful(Workflow):
    """Keeps the last two messages only, so that histories fork, and replies the same in every turn."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        first = {"role": "user", "content": workflow_task.task.main_query}
        messages: list[dict[str, Any]] = [first]
        said = ""
        for _ in range(4):
            answer = await model_tuner.chat([first, *messages[-2:]] if len(messages) > 2 else messages)
            said += answer.parsed.content
            messages += [dict(answer.call.messages[-1]), {"role": "user", "content": "Try again."}]
        return WorkflowOutput(reward=sum(map(str.isdigit, said)) / max(len(said), 1))


class Hopeless(Letters):
    """Too hard for the model: early in learning, no episode is rewarded."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        output = await super().execute(workflow_task, model_tuner)
        return WorkflowOutput(reward=0.0, is_success=False, metadata=output.metadata)


class Flaky(Letters):
    """Fails in some episodes, and has repairable mistakes that it reports."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        output = await super().execute(workflow_task, model_tuner)
        if workflow_task.seed % 9 == 0:
            raise TimeoutError("the environment did not answer")
        return WorkflowOutput(
            reward=output.reward, metadata={"error": "no answer found" if not output.reward else None}
        )


class ClumsyTool(Math):
    """The tool reports the mistakes of the model, which are many early in learning."""

    def run_tool(self, code: str, task: WorkflowTask) -> str:
        if len(code) % 2:
            return "SyntaxError: invalid syntax in the code"
        return printed(code)


class RepeatsQuestion(Math):
    """Shows the question twice, with choices from the data that contain the answer."""

    def question(self, task: WorkflowTask) -> str:
        choices = ", ".join(task.task.metadata.get("choices", ()))
        return f"{task.task.main_query}" + (f" Choices: {choices}." if choices else "")


class ToolOnce(Workflow):
    """Offers a tool and stops after the first answer, whatever it is; the reward is for the use of the tool."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        messages = [{"role": "user", "content": workflow_task.task.main_query}]
        answer = await model_tuner.chat(messages, tools=TOOLS)
        return WorkflowOutput(reward=float(bool(answer.parsed.tool_calls)), metadata={"answer": answer.parsed.content})


class Near(BaseJudge):
    """A continuous reward: how near the boxed number is to the reference."""

    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> tuple[float, bool]:
        found = re.findall(r"\\boxed\{(-?\d+)\}", str(workflow_output.metadata["final_answer"]))
        if not found:
            return -1.0, False
        distance = abs(int(found[-1]) - int(workflow_task.task.metadata["answer"]))
        return 1.0 / (1.0 + distance / 10), distance == 0
