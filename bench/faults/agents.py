"""Ordinary workflows and judges, and the same with one fault each.

The model calls a Python tool in half of its episodes, and its answer is then right; in the other half it guesses.
"""

from __future__ import annotations

import ast
import operator
import random
import re
from typing import Any

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask
from astuner.task_judge.judge_base import BaseJudge
from tutorial.example_math_agent.math_agent import system_prompt

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "execute_python_code",
            "parameters": {
                "properties": {
                    "code": {"description": "The Python code to be executed.", "type": "string"},
                    "timeout": {
                        "default": 300,
                        "description": "The maximum time (in seconds) allowed for the code to run.",
                        "type": "number",
                    },
                },
                "required": ["code"],
                "type": "object",
            },
            "description": "Execute the given python code in a temp file and capture the return\n"
            "code, standard output and error. Note you must `print` the output to get\n"
            "the result, and the tmp file will be removed right after the execution.",
        },
    }
]
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def printed(code: str) -> str:
    """Return what `print(12 + 7)` prints, for a sum, a difference or a product."""
    try:
        call = ast.parse(code.strip(), mode="eval").body
        assert isinstance(call, ast.Call)
        (expression,) = call.args
        assert isinstance(expression, ast.BinOp)
        left, right = ast.literal_eval(expression.left), ast.literal_eval(expression.right)
        value = _OPERATORS[type(expression.op)](left, right)
    except (SyntaxError, AssertionError, ValueError, KeyError, TypeError) as error:
        return f"<returncode>1</returncode><stdout></stdout><stderr>{type(error).__name__}: {error}</stderr>"
    return f"<returncode>0</returncode><stdout>{value}\n</stdout><stderr></stderr>"


class Math(Workflow):
    """Solves a task with at most one call of a tool."""

    system = system_prompt

    def question(self, task: WorkflowTask) -> str:
        return task.task.main_query

    def run_tool(self, code: str, task: WorkflowTask) -> str:
        return printed(code)

    def sent_back(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the model's answer as the next request has it."""
        return message

    def next_system(self, turn: int) -> str:
        return self.system

    def output(self, text: str, task: WorkflowTask) -> WorkflowOutput:
        return WorkflowOutput(metadata={"final_answer": text})

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": self.next_system(0)},
            {"role": "user", "content": self.question(workflow_task)},
        ]
        text = ""
        for turn in range(2):
            answer = await model_tuner.chat(messages, tools=TOOLS)
            text = answer.parsed.content
            if not answer.parsed.tool_calls or turn == 1:
                break
            messages.append(self.sent_back(dict(answer.call.messages[-1])))
            for call in answer.parsed.tool_calls:
                result = self.run_tool(str(call.arguments.get("code", "")), workflow_task)
                messages.append({"role": "tool", "content": result, "tool_call_id": call.id, "name": call.name})
            messages[0] = {"role": "system", "content": self.next_system(turn + 1)}
        return self.output(text, workflow_task)


class Exact(BaseJudge):
    """Compares the boxed number with the reference."""

    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> tuple[float, bool]:
        found = re.findall(r"\\boxed\{([^{}]*)\}", str(workflow_output.metadata["final_answer"]))
        solved = bool(found) and found[-1].strip() == workflow_task.task.metadata["answer"]
        return float(solved), solved


# ------------------------------------------------------------------ workflows with a fault


class RetokenisedByClient(Math):
    """Writes the model's tool call into the text of the message, as clients do that keep text only."""

    def sent_back(self, message: dict[str, Any]) -> dict[str, Any]:
        calls = message.pop("tool_calls", [])
        function = calls[0]["function"]
        text = f'<tool_call>{{"name": "{function["name"]}", "arguments": {function["arguments"]}}}</tool_call>'
        return {**message, "content": text}


class SystemChanges(Math):
    def next_system(self, turn: int) -> str:
        return f"{self.system}\nCalls of tools so far: {turn}." if turn else self.system


class ToolAlwaysFails(Math):
    def run_tool(self, code: str, task: WorkflowTask) -> str:
        return "ConnectionError: cannot connect to sandbox at 10.0.0.7:8080 (connection refused)"


class IgnoresTask(Math):
    def question(self, task: WorkflowTask) -> str:
        return "What is the answer to the question?"


class ShowsAnswer(Math):
    """Formats the whole row of the data into the prompt."""

    def question(self, task: WorkflowTask) -> str:
        return f"{task.task.main_query}\n{task.task.metadata['answer']}"


class SwallowsCrash(Math):
    """Catches the exception of its environment and returns an output."""

    def run_tool(self, code: str, task: WorkflowTask) -> str:
        raise ConnectionError("the sandbox is not reachable")

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        try:
            return await super().execute(workflow_task, model_tuner)
        except Exception as error:
            return WorkflowOutput(metadata={"final_answer": "", "error": repr(error)})


class Walk(Workflow):
    """Walks on a line towards a target: each observation has the position, which the words of an answer move."""

    frozen = False

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        place = random.Random(workflow_task.task_id).randint(10, 60)
        start = place
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"{workflow_task.task.main_query} At {place}."}]
        for _ in range(3):
            answer = await model_tuner.chat(messages)
            place += sum(map(ord, answer.parsed.content)) % 17 - 8
            messages.append(dict(answer.call.messages[-1]))
            messages.append({"role": "user", "content": f"You are at {start if self.frozen else place}."})
        await model_tuner.chat(messages)
        reward = max(0.0, 1.0 - abs(place - start) / 20)
        return WorkflowOutput(reward=reward, is_success=reward > 0.7)


class FrozenWalk(Walk):
    """The environment returns its first observation for ever."""

    frozen = True


# ------------------------------------------------------------------ judges with a fault


class GivesZero(Exact):
    """Compares the whole text with the reference; the text is never the bare number."""

    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> tuple[float, bool]:
        solved = workflow_output.metadata["final_answer"] == workflow_task.task.metadata["answer"]
        return float(solved), solved


class GivesOne(Exact):
    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> tuple[float, bool]:
        return 1.0, True


class GivesNan(Exact):
    """Divides by the length of an empty list, as numpy does."""

    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> tuple[float, bool]:
        return float("nan"), False


class Inverted(Exact):
    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> tuple[float, bool]:
        reward, solved = super().compute_reward(workflow_task, workflow_output)
        return 1.0 - reward, not solved


class RandomReward(Exact):
    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> tuple[float, bool]:
        solved = random.random() < 0.5
        return float(solved), solved


class ReadsRewardColumn(Exact):
    """Takes the maximal reward of a task from the data, where it is text."""

    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> tuple[float, bool]:
        _, solved = super().compute_reward(workflow_task, workflow_output)
        reward: Any = workflow_task.task.metadata["reward"] if solved else 0.0
        return reward, solved
