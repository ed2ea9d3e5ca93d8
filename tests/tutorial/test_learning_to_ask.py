"""The learning-to-ask example: the patients, the agent and its judge, and the transcripts of the starting model."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from astuner.config.loading import load_config
from astuner.model_tuner.chat_options import CallSettings
from astuner.model_tuner.codec import ChatCodec
from astuner.model_tuner.targets import FrozenModel, Targets
from astuner.schema import Episode, SamplingParams, Task, WorkflowTask
from astuner.task_judge.judge_base import make_judge
from astuner.task_runner.runner import TaskRunner
from tests.scripted_engine import ScriptedEngine
from tutorial.example_learning_to_ask import clinic, prepare_data, prepare_model
from tutorial.example_learning_to_ask.clinic import RULES, TOPICS, RuleBasedPatient, departments, needed_topics
from tutorial.example_learning_to_ask.learning_to_ask import MAX_TURNS, LearningToAsk, LearningToAskAnLlm

CONFIG = Path(__file__).parents[2] / "tutorial/example_learning_to_ask/learning_to_ask_tiny.yaml"
FACTS = {"fever": True, "accident": False, "duration": True, "travel": False, "tablets": False, "age": False}
QUESTION_COST = load_config(CONFIG).config.astuner.task_judge.params["question_cost"]
TASK = prepare_data.make_task("a headache", FACTS, ["fever"])


async def run(
    tokenizer: Any, answers: Sequence[str], workflow: type[LearningToAsk] = LearningToAsk, task: dict[str, Any] = TASK
) -> Episode:
    """Run an episode in which the models answer with `answers`, in this order."""
    texts = iter(answers)

    def complete(prompt: Sequence[int], params: SamplingParams) -> list[int]:
        ids: list[int] = tokenizer.encode(f"{next(texts)}<|im_end|>", add_special_tokens=False)
        return ids

    section = load_config(CONFIG).config.astuner.task_judge
    assert section.judge_protocol
    judge = make_judge(section.judge_protocol, section, section.params)
    targets = Targets(("desk",), {"patient": FrozenModel()})
    runner = TaskRunner(workflow, judge, ScriptedEngine(complete, 4096), ChatCodec(tokenizer), targets=targets)
    given = WorkflowTask(Task("t", task["question"], metadata=task), "train-000001-t-0")
    return await runner.run(given, runner.tuner(given, CallSettings(max_model_len=4096, max_response_length=4096)))


@pytest.mark.parametrize(
    ("answers", "reward", "is_success"),
    [
        (["Did you fall?", "Since when?", "<department>neurology</department>"], 0.8, True),
        (["Did you fall? And since when?", "So: <department> Neurology </department>"], 0.8, True),
        (["<department>neurology</department>"], 1.0, True),
        (["Did you fall?", "<department>emergency</department>"], 0.0, False),
        (["Hello."] * MAX_TURNS, 0.0, False),
    ],
)
async def test_the_reward_is_less_with_every_question(
    tokenizer: Any, answers: list[str], reward: float, is_success: bool
) -> None:
    episode = await run(tokenizer, answers)
    assert (episode.status, len(episode.calls)) == ("ok", len(answers)), episode.error
    assert (episode.reward, episode.is_success) == (pytest.approx(reward), is_success)
    assert len(episode.samples) == 1


async def test_the_patient_states_only_what_the_question_is_about() -> None:
    patient = RuleBasedPatient(FACTS)
    assert await patient.answer("Do you have a fever?") == "I have a fever."
    assert await patient.answer("How old are you, and did you fall?") == "I had no accident. I am 40 years old."
    assert await patient.answer("What is your name?") == "I do not know."


def test_each_question_of_a_topic_is_recognised_as_one_about_this_topic() -> None:
    assert {name: clinic.topics_of(topic.question) for name, topic in TOPICS.items()} == {
        name: [name] for name in TOPICS
    }
    assert clinic.count_questions("Hello.") == 1
    assert clinic.count_questions("Fever, tablets, travel?") == 3
    assert clinic.count_questions("Who? Why?") == 2


async def test_an_llm_can_be_the_patient(tokenizer: Any) -> None:
    answers = ["Did you fall?", "No.", "Since when?", "For weeks.", "<department>neurology</department>"]
    episode = await run(tokenizer, answers, LearningToAskAnLlm)
    assert (episode.status, episode.reward) == ("ok", pytest.approx(0.8)), episode.error
    assert [(call.agent_name, call.trained) for call in episode.calls] == [
        ("desk", True),
        ("patient", False),
        ("desk", True),
        ("patient", False),
        ("desk", True),
    ]
    assert "You have a headache. I have a fever. I had no accident." in episode.calls[1].messages[0]["content"]
    assert episode.calls[2].messages[-2]["content"] == "No."


def test_the_needed_topics_decide_the_department() -> None:
    for complaint, rule in RULES.items():
        for values in itertools.product([True, False], repeat=len(TOPICS)):
            facts = dict(zip(TOPICS, values, strict=True))
            for known in ({}, {"age": facts["age"]}, {"duration": facts["duration"], "fever": facts["fever"]}):
                asked = {topic: facts[topic] for topic in needed_topics(rule, facts, known)}
                assert not asked.keys() & known.keys()
                assert departments(rule, {**known, **asked}) == {clinic.department(complaint, facts)}
                before_last = dict(list(asked.items())[:-1])
                assert not asked or len(departments(rule, {**known, **before_last})) > 1
    assert needed_topics(RULES["chest pain"], FACTS, {}) == []
    assert needed_topics(RULES["a headache"], FACTS, {"fever": True}) == ["accident", "duration"]


async def test_the_transcripts_have_the_prompts_of_the_agent(tokenizer: Any) -> None:
    task = prepare_data.tasks()[0][0]
    rng = random.Random(0)
    messages = max((prepare_model.transcript(task, rng)["messages"] for _ in range(10)), key=len)
    assert len(messages) > 3
    episode = await run(tokenizer, [message["content"] for message in messages[2::2]], task=task)
    sent = [{"role": message["role"], "content": message["content"]} for message in episode.calls[-1].messages]
    assert sent == messages


def test_the_expected_results_of_the_desks() -> None:
    """Those of the desk of the transcripts, over all its random choices, and of a desk that asks what it needs.

    The page of the example states them.
    """
    mixed: list[Any] = []
    careful: list[tuple[float, float, float]] = []
    for task in prepare_data.tasks()[1]:
        needed = needed_topics(RULES[task["complaint"]], task["facts"], stated_facts(task))
        careful.append(expected(task, [needed]))
        numbers = range(prepare_model.MAX_QUESTIONS + 1)
        by_number = [expected(task, list(itertools.combinations(TOPICS, number))) for number in numbers]
        careless = np.mean(by_number, axis=0)
        mixed.append(prepare_model.CARELESS * careless + (1 - prepare_model.CARELESS) * np.array(careful[-1]))
    assert [f"{value:.2f}" for value in np.mean(mixed, axis=0)] == ["0.77", "1.32", "0.67"]
    assert [f"{value:.2f}" for value in np.mean(careful, axis=0)] == ["1.00", "0.90", "0.91"]


def stated_facts(task: dict[str, Any]) -> dict[str, bool]:
    return {topic: task["facts"][topic] for topic in task["stated"]}


def expected(task: dict[str, Any], choices: Sequence[Sequence[str]]) -> tuple[float, float, float]:
    """Return the mean success, number of questions and reward of a desk that asks about one of `choices` at random."""
    successes, rewards = [], []
    for asked in choices:
        known = {**stated_facts(task), **{topic: task["facts"][topic] for topic in asked}}
        possible = departments(RULES[task["complaint"]], known)
        successes.append(1 / len(possible))  # a department that is possible, at random
        rewards.append(successes[-1] * (1 - QUESTION_COST * len(asked)))
    return float(np.mean(successes)), float(np.mean([len(asked) for asked in choices])), float(np.mean(rewards))


def test_tasks_are_seeded_and_the_splits_share_no_request() -> None:
    training, validation = prepare_data.tasks()
    assert prepare_data.tasks() == (training, validation)
    assert (len(training), len(validation)) == (prepare_data.TRAINING_TASKS, prepare_data.VALIDATION_TASKS)
    assert not {task["question"] for task in training} & {task["question"] for task in validation}
    assert all(clinic.department(task["complaint"], task["facts"]) == task["department"] for task in validation)
