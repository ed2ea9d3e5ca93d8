"""The countdown example: its tasks, its agent on a scripted model, and the transcripts of its starting model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from astuner.config.loading import load_config
from astuner.model_tuner.chat_options import CallSettings
from astuner.model_tuner.codec import ChatCodec
from astuner.schema import Episode, SamplingParams, Task, WorkflowTask
from astuner.task_judge.countdown_as_judge import countdown_expression, evaluate_expression
from astuner.task_judge.judge_base import make_judge
from astuner.task_runner.runner import TaskRunner
from tests.scripted_engine import ScriptedEngine
from tutorial.example_countdown import prepare_data, prepare_model
from tutorial.example_countdown.countdown_agent import CountdownWorkflow

CONFIG = Path(__file__).parents[2] / "tutorial/example_countdown/countdown_tiny.yaml"


async def run(tokenizer: Any, task: dict[str, Any], answer: str) -> tuple[Episode, str]:
    """Run one episode with a model that answers with `answer`. Return the episode and the prompt."""
    prompts: list[str] = []

    def complete(prompt: Sequence[int], params: SamplingParams) -> list[int]:
        prompts.append(tokenizer.decode(list(prompt)))
        ids: list[int] = tokenizer.encode(f"{answer}<|im_end|>", add_special_tokens=False)
        return ids

    section = load_config(CONFIG).config.astuner.task_judge
    assert section.judge_protocol
    judge = make_judge(section.judge_protocol, section, section.params)
    runner = TaskRunner(
        CountdownWorkflow, judge, ScriptedEngine(complete, max_model_len=512), ChatCodec(tokenizer, "qwen3")
    )
    given = WorkflowTask(Task("t", task["question"], metadata=task), "train-000001-t-0")
    return await runner.run(given, runner.tuner(given, CallSettings(max_model_len=512))), prompts[0]


@pytest.mark.parametrize(
    ("answer", "reward", "legal"),
    [("<answer>9-2+5</answer>", 1.0, 1.0), ("<answer>9+2+5</answer>", 0.0, 1.0), ("<answer>12</answer>", 0.0, 0.0)],
)
async def test_the_agent_is_judged(tokenizer: Any, answer: str, reward: float, legal: float) -> None:
    task = {"question": "Numbers: 2 9 5. Target: 12.", "numbers": [2, 9, 5], "target": 12}
    episode, _ = await run(tokenizer, task, answer)
    assert (episode.status, episode.reward, episode.is_success) == ("ok", reward, reward == 1.0), episode.error
    assert episode.judgement is not None
    assert episode.judgement.components == {"legal": legal, "correct": reward}


async def test_a_transcript_has_the_prompt_of_the_agent(tokenizer: Any) -> None:
    puzzle = prepare_data.puzzles()[0][0]
    messages = prepare_model.transcript(puzzle, random.Random(0))["messages"]
    question = messages[1]["content"]
    episode, prompt = await run(tokenizer, {"question": question, "numbers": [1], "target": 1}, messages[2]["content"])
    assert len(episode.calls) == 1
    assert prompt == tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)


def test_searches_find_the_target_and_guesses_use_the_numbers() -> None:
    rng = random.Random(0)
    training, validation = prepare_data.puzzles()
    for puzzle in [*training[:200], *validation]:
        numbers, target = puzzle
        value, used = evaluate_expression(countdown_expression(prepare_model.search(puzzle)))
        assert (value, sorted(used, reverse=True)) == (target, list(numbers))
        guessed = evaluate_expression(countdown_expression(prepare_model.guess(puzzle, rng)))[1]
        assert sorted(guessed, reverse=True) == list(numbers)


def test_tasks_are_seeded_and_the_splits_share_no_puzzle() -> None:
    training, validation = prepare_data.puzzles()
    assert prepare_data.puzzles() == (training, validation)
    assert len(validation) == prepare_data.VALIDATION_TASKS
    assert not set(training) & set(validation)
    task = prepare_data.make_task(validation[0], random.Random(0))
    assert sorted(task["numbers"], reverse=True) == list(validation[0][0])
