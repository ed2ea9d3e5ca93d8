"""Two agents: one has a calculator, and one answers in one call."""

import re

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask
from astuner.task_judge.countdown_as_judge import evaluate_expression

NUMBER_PROMPT = "Answer with the number only."
SYSTEM_PROMPT = "Solve the task. Write the answer in the last line, after Answer:"
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Compute an expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


def conversation(question: str) -> list[dict]:
    """Return the first messages of the agents that write their answer in the last line."""
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]


def final_answer(text: str) -> str:
    """Return the text after the last `Answer:`, or the whole text if it has no `Answer:`."""
    return text.rpartition("Answer:")[2].strip()


def calculate(expression: object) -> str:
    """Return the value of an expression of whole numbers, or an error message."""
    try:
        return str(evaluate_expression(str(expression).strip())[0])
    except ValueError as error:
        return f"error: {error}"


class NumberAgent(Workflow):
    """An agent for the raw model, which seldom writes the number only. The answer is the last number that it writes."""

    name = "number_agent"

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        question = {"role": "user", "content": workflow_task.main_query}
        answer = await model_tuner.chat([{"role": "system", "content": NUMBER_PROMPT}, question])
        numbers = re.findall(r"(?<!\d)-?\d+", answer.text)
        return WorkflowOutput(metadata={"final_answer": numbers[-1] if numbers else "no number"})


class CalculatorAgent(Workflow):
    name = "calculator_agent"

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        messages = conversation(workflow_task.main_query)
        while True:
            answer = await model_tuner.chat(messages, tools=[CALCULATOR])
            if not answer.tool_calls:
                return WorkflowOutput(metadata={"final_answer": final_answer(answer.text)})
            messages.append(answer.message)
            for call in answer.tool_calls:
                result = calculate(call.arguments.get("expression"))
                messages.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result})
