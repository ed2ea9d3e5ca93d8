"""The generators of Reasoning Gym, with the real package."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from astuner.env_service import load_environment
from astuner.env_service.environment import adapter
from astuner.errors import EnvError

pytest.importorskip("reasoning_gym")

# acre, gsm_symbolic and list_functions use tables of the whole data set; tower_of_hanoi has few distinct questions.
GENERATORS = ["chain_sum", "acre", "gsm_symbolic", "list_functions", "tower_of_hanoi", "leg_counting", "pool_matrix"]


@pytest.mark.parametrize("name", GENERATORS)
def test_splits_have_no_question_in_common_whatever_the_seeds(name: str) -> None:
    questions: dict[str, set[str]] = {"train": set(), "validation": set()}
    seeds: dict[str, set[int]] = {"train": set(), "validation": set()}
    for seed in (0, 1, 1023) if name != "acre" else (0,):  # its tables take a while
        env = load_environment(f"reasoning_gym/{name}", {"seed": seed})
        for split, found in questions.items():
            for task_id in env.task_ids(split)[:40]:
                profile = env.profile(split, task_id)
                found.add(profile.main_query)
                seeds[split].add(profile.metadata["seed"])
    assert not questions["train"] & questions["validation"]
    assert len(seeds["train"]) == len(seeds["validation"]) >= 40
    assert not seeds["train"] & seeds["validation"]
    assert min(map(len, questions.values())) > 3


def test_the_numbers_of_tasks_and_the_order_of_use_do_not_change_a_task() -> None:
    small = load_environment("reasoning_gym/gsm_symbolic", {"train_tasks": 10})
    large = load_environment("reasoning_gym/gsm_symbolic", {"train_tasks": 60_000, "validation_tasks": 5})
    assert large.profile("train", "59999").main_query != large.profile("train", "0").main_query
    for task_id in ("7", "0"):
        assert small.profile("train", task_id) == large.profile("train", task_id)


@pytest.mark.parametrize(
    "name", [*GENERATORS, "bf", "prime_factorization", "graph_color", "rubiks_cube", "propositional_logic", "rush_hour"]
)
def test_answers_are_scored_by_the_generator(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    env = load_environment(f"reasoning_gym/{name}")
    profile = env.profile("validation", "3")
    observation = env.reset("validation", "3", 0)
    assert observation.text == ""
    assert env.evaluate().score == 0
    if profile.reference is None:
        assert name == "rush_hour"  # has many solutions, and gives none of them
    else:
        (answer,) = profile.reference.actions
        assert answer not in ("", None)
        result = env.step(answer)
        assert (result.reward, result.is_done, result.is_valid) == (1, True, True)
        assert env.evaluate().is_success
    env.reset("validation", "3", 0)
    wrong = env.step("¤")
    assert wrong.is_done
    assert wrong.reward == env.evaluate().score < 1
    assert not env.evaluate().is_success
    assert capfd.readouterr().out == ""  # the compiler of bf prints


@pytest.mark.parametrize(
    ("form", "is_valid", "score"),
    [
        ("{}", True, 1),
        ("  {}\n", True, 1),
        ("<think>12 or 13?</think> <answer> {} </answer>", True, 1),
        ("<answer>1</answer> no, <answer>{}</answer>", True, 1),
        ("", False, 0),
        ("   ", False, 0),
        ("<answer></answer>", False, 0),
    ],
)
def test_the_answer_is_the_text_or_what_its_tags_contain(form: str, is_valid: bool, score: float) -> None:
    env = load_environment("reasoning_gym/chain_sum")
    reference = env.reference("train", "5")
    assert reference is not None
    env.reset("train", "5", 0)
    result = env.step(form.format(*reference.actions))
    assert (result.is_valid, result.reward) == (is_valid, score)


@pytest.mark.parametrize(("form", "text"), [("box", "So \\boxed{{{}}}."), ("code", "So\n```\n{}\n```")])
def test_the_preferred_form_is_asked_for_and_read(form: Any, text: str) -> None:
    env = load_environment("reasoning_gym/graph_color")
    env.action_preference = form
    assert "<answer>" not in env.profile("train", "0").main_query
    reference = env.reference("train", "0")
    assert reference is not None
    env.reset("train", "0", 0)
    result = env.step(text.format(*reference.actions))  # JSON, with braces of its own
    assert result.reward == 1


def test_a_tool_call_answers() -> None:
    env = load_environment("reasoning_gym/chain_sum")
    reference = env.reference("train", "5")
    assert reference is not None
    assert env.tools[0]["function"]["name"] == "answer"
    env.reset("train", "5", 0)
    assert env.step({"name": "answer", "arguments": {"answer": reference.actions[0]}}).reward == 1
    env.reset("train", "5", 0)
    assert env.step({"name": "other", "arguments": {"answer": reference.actions[0]}}).reward == 0


def test_an_answer_that_the_generator_cannot_score_is_wrong_and_its_error_is_kept() -> None:
    env = load_environment("reasoning_gym/prime_factorization")
    env.reset("train", "0", 0)
    result = env.step("seven")
    assert result.reward == 0
    assert "ValueError" in result.info["scoring_error"]
    assert env.evaluate().details["scoring_error"] == result.info["scoring_error"]


@pytest.mark.parametrize("name", ["spiral_matrix", "binary_matrix", "string_insertion", "simple_integration"])
@pytest.mark.parametrize(
    "answer",
    [
        "[__import__('os').system('touch made')]",
        "[__import__('subprocess').run(['touch', 'made'])]",
        "[open('made', 'w')]",
        "[__import__('pathlib').Path('made').touch()]",
        "[exit()]",
    ],
)
def test_answers_that_generators_evaluate_have_no_effects(
    name: str, answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    env = load_environment(f"reasoning_gym/{name}")
    env.reset("train", "0", 0)
    result = env.step(answer)
    assert result.is_done
    assert float(result.reward) < 1  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "afterwards").touch()


def test_generators_leave_the_global_random_generators_alone() -> None:
    random.seed(1)
    np.random.seed(1)
    env = load_environment("reasoning_gym/pool_matrix")  # seeds NumPy's
    first = env.profile("train", "0").main_query
    env.reset("train", "0", 0)
    env.step("1")
    drawn = random.random(), np.random.random()
    random.seed(1)
    np.random.seed(1)
    assert drawn == (random.random(), np.random.random())
    assert load_environment("reasoning_gym/pool_matrix").profile("train", "0").main_query == first


def test_parameters_are_those_of_the_generator() -> None:
    env = load_environment("reasoning_gym/chain_sum", {"min_terms": 5, "max_terms": 5})
    assert env.profile("train", "0").main_query.count("+") + env.profile("train", "0").main_query.count(" - ") >= 4
    composite = load_environment(
        "reasoning_gym/composite", {"datasets": [{"name": "chain_sum", "weight": 1, "config": {"min_terms": 2}}]}
    )
    reference = composite.reference("train", "0")
    assert reference is not None
    composite.reset("train", "0", 0)
    assert composite.step(reference.actions[0]).reward == 1


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("chain_sums", {}, "no generator 'chain_sums'"),
        (
            "chain_sum",
            {"terms": 3},
            "no parameter 'terms'; its parameters are train_tasks, validation_tasks, seed, min_",
        ),
        ("chain_sum", {"size": 3}, "no parameter 'size'"),
        ("chain_sum", {"min_terms": 9, "max_terms": 2}, "AssertionError"),
        ("chain_sum", {"seed": -1}, "seed is -1"),
        ("composite", {}, "Must specify at least one dataset"),
    ],
)
def test_wrong_parameters_are_errors(name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvError, match=message):
        load_environment(f"reasoning_gym/{name}", params)


def test_all_generators_are_listed() -> None:
    assert len(adapter("reasoning_gym").names()) > 100
