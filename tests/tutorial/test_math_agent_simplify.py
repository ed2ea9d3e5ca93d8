"""The minimal agent runs Python and scores its own answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from astuner.model_tuner.chat_options import CallSettings
from astuner.model_tuner.codec import ChatCodec
from astuner.schema import Episode, Task, WorkflowTask
from astuner.task_runner.runner import TaskRunner
from tests.scripted_engine import ScriptedEngine
from tutorial.example_math_agent.math_agent_simplify import MathToolWorkflow

CALL = '<tool_call>\n{"name": "execute_python_code", "arguments": {"code": "print(19 + 23)"}}\n</tool_call>'


async def run(answers: Sequence[str], tokenizer: Any) -> Episode:
    """Run one episode on the task 19 + 23, without a judge, with a model that answers with `answers`."""
    remaining = [tokenizer.encode(f"{answer}<|im_end|>", add_special_tokens=False) for answer in answers]
    engine = ScriptedEngine(lambda prompt, params: remaining.pop(0), max_model_len=8192)
    runner = TaskRunner(MathToolWorkflow, None, engine, ChatCodec(tokenizer))
    task = WorkflowTask(Task("1", "What is 19 + 23?", metadata={"answer": "We add. #### 42"}), "train-000001-1-0")
    settings = CallSettings(max_model_len=8192, max_response_length=8192)
    return await runner.run(task, runner.tuner(task, settings))


async def test_tool_runs_and_answer_is_scored(tokenizer: Any):
    episode = await run([CALL, "\\boxed{42}"], tokenizer)
    assert (episode.status, episode.reward, episode.is_success) == ("ok", 1.0, True), episode.error
    assert "<stdout>42\n</stdout>" in episode.calls[1].messages[-2]["content"]
    assert len(episode.samples) == 1


@pytest.mark.parametrize("answer", ["\\boxed{41}", "I do not know."])
async def test_wrong_answer_is_a_zero_reward_and_not_a_failure(answer: str, tokenizer: Any):
    episode = await run([answer], tokenizer)
    assert (episode.status, episode.reward, episode.is_success) == ("ok", 0.0, False), episode.error
