"""One scripted episode: a system prompt, tool calls, parallel tool calls, an answer that stops and one that is cut."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from astuner import ModelTuner, WorkflowTask
from astuner.model_tuner.chat_options import CallSettings
from astuner.model_tuner.codec import ChatCodec
from astuner.schema import Episode, Task
from astuner.task_runner.runner import TaskRunner
from astuner.workflow import FunctionWorkflow
from tests.scripted_engine import ScriptedEngine

SYSTEM = "Use the tool for every sum."
QUESTIONS = ("What are 1 + 2, 3 + 4 and 5 + 6?", "Now write a poem about it.")
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
"""The definition of the tool, as the model gets it."""

Agent = Callable[[ModelTuner], Awaitable[Any]]
"""Asks the two questions in one conversation, with `SYSTEM` and `ADD`, and runs the tool calls of the answers."""


def tool_call(a: int, b: int) -> str:
    return f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>'


END = "<|im_end|>"
ANSWERS = (
    tool_call(1, 2) + END,
    "Now both others.\n" + tool_call(3, 4) + "\n" + tool_call(5, 6) + END,
    "They are 3, 7 and 11." + END,
    "Three, seven and eleven, " * 40,  # longer than the limit
)


def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return str(a + b)


def run_episode(agent: Agent, tokenizer: Any, answers: Sequence[str] = ANSWERS) -> Episode:
    """Return the episode of an agent whose model gives the scripted answers, one per call."""
    texts = iter(answers)
    engine = ScriptedEngine(
        lambda prompt, params: tokenizer.encode(next(texts), add_special_tokens=False), max_model_len=8192
    )

    async def run(task: WorkflowTask, model_tuner: ModelTuner) -> float:
        await agent(model_tuner)
        return 1.0

    runner = TaskRunner(lambda: FunctionWorkflow(run), None, engine, ChatCodec(tokenizer))
    task = WorkflowTask(Task("t", QUESTIONS[0]), "train-000001-t-0")
    settings = CallSettings(
        max_tokens=64, max_model_len=8192, max_prompt_length=8192, max_response_length=8192, madness_checklist=()
    )
    return asyncio.run(runner.run(task, runner.tuner(task, settings)))


def training_data(episode: Episode) -> list[Any]:
    """Return what the episode trains on: the tokens of the calls, and the samples with their masks."""
    assert episode.status == "ok", episode.error_traceback or episode.error
    calls = [
        (call.prompt_ids, call.completion_ids, call.logprobs, call.finish_reason, call.trained, call.fork)
        for call in episode.calls
    ]
    samples = [
        (sample.token_ids, sample.train_counts, sample.logprobs, sample.position_ids, sample.weight)
        for sample in episode.samples
    ]
    return [calls, samples]
