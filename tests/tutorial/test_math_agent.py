"""The agent of the tutorial, an unmodified AgentScope ReActAgent with a Python tool, on a scripted model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from astuner.config.data import TaskJudgeConfig
from astuner.config.loading import load_config
from astuner.context_tracker.audit import certificate
from astuner.model_tuner.chat_options import CallSettings
from astuner.model_tuner.codec import ChatCodec
from astuner.schema import Episode, SamplingParams, Task, WorkflowTask
from astuner.task_judge.math_answer_as_judge import MathAnswerAsJudge
from astuner.task_runner.runner import TaskRunner
from tests.scripted_engine import ScriptedEngine
from tutorial.example_math_agent.math_agent import MathAgentWorkflow
from tutorial.example_math_agent.prepare_data import make_splits

TUTORIAL = Path(__file__).parents[2] / "tutorial" / "example_math_agent"


def run(tokenizer: Any, answers: list[str]) -> tuple[Episode, list[str]]:
    """Run one episode with a model that answers with `answers`. Return the episode and the prompts as text."""
    prompts: list[str] = []

    def answer(prompt: Sequence[int], params: SamplingParams) -> list[int]:
        prompts.append(tokenizer.decode(list(prompt)))
        ids: list[int] = tokenizer.encode(answers[len(prompts) - 1], add_special_tokens=False)
        return ids

    judge = MathAnswerAsJudge(TaskJudgeConfig())
    engine = ScriptedEngine(answer, max_model_len=8192)
    runner = TaskRunner(MathAgentWorkflow, judge, engine, ChatCodec(tokenizer, "qwen3"))
    task = WorkflowTask(Task("t", "What is 6 * 7?", metadata={"answer": "42"}), "train-000001-t-0")
    settings = CallSettings(max_model_len=8192, max_response_length=8192)
    return asyncio.run(runner.run(task, runner.tuner(task, settings))), prompts


def test_agent_runs_python_and_is_judged(tokenizer: Any):
    call = '<tool_call>\n{"name": "execute_python_code", "arguments": {"code": "print(6*7)"}}\n</tool_call><|im_end|>'
    episode, prompts = run(tokenizer, [call, "It is \\boxed{42}<|im_end|>"])
    assert (episode.status, episode.reward, episode.is_success) == ("ok", 1.0, True), episode.error
    assert '"name": "execute_python_code"' in prompts[0]
    assert "<tool_response>\n<returncode>0</returncode><stdout>42\n</stdout>" in prompts[1]
    assert len(episode.samples) == 1
    assert certificate(episode.calls, episode.samples) == 1.0


def test_wrong_answer_has_zero_reward(tokenizer: Any):
    episode, _ = run(tokenizer, ["\\boxed{41}<|im_end|>"])
    assert (episode.status, episode.reward, episode.is_success) == ("ok", 0.0, False)


def test_agent_summarizes_after_its_last_tool_call(tokenizer: Any):
    call = '<tool_call>\n{"name": "no_such_tool", "arguments": {}}\n</tool_call><|im_end|>'
    episode, prompts = run(tokenizer, [call, call, "\\boxed{42}<|im_end|>"])
    assert (episode.status, episode.reward, len(episode.calls)) == ("ok", 1.0, 3)
    assert "no_such_tool" in prompts[1]
    assert certificate(episode.calls, episode.samples) == 1.0


def test_tasks_are_seeded_and_disjoint():
    training, validation = make_splits()
    assert make_splits() == (training, validation)
    assert (len(training), len(validation)) == (640, 200)
    questions = {task["question"] for task in training}
    assert len(questions) == 640
    assert not questions & {task["question"] for task in validation}
    for task in validation[:20]:
        expression = task["question"].removeprefix("What is ").removesuffix("?")
        assert str(eval(expression)) == task["answer"]


@pytest.mark.parametrize("path", sorted(TUTORIAL.glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configurations_load(path: Path):
    loaded = load_config(path)
    assert loaded.config.astuner.rollout.agentscope_workflow
