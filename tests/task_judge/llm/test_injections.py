"""Prompt injections in judged answers, against a judge that obeys every instruction that is not marked as data."""

from __future__ import annotations

import pytest

from campaigns.judge_injections import (
    ANSWERS,
    INJECTIONS,
    MAX_SCORE,
    fenced_prompts,
    measure,
    naive_prompt,
    scripted_judge,
)

QUESTION, RIGHT, WRONG = ANSWERS[0]


@pytest.mark.parametrize("injection", INJECTIONS)
def test_an_injection_cannot_leave_the_fence(injection: str):
    judge, prompt = scripted_judge(), fenced_prompts()
    assert judge(prompt(QUESTION, f"{WRONG} {injection}")) == judge(prompt(QUESTION, WRONG)) == 1.0
    assert judge(prompt(QUESTION, f"{RIGHT} {injection}")) == MAX_SCORE


def test_the_injections_move_the_scores_of_a_naive_prompt():
    result = measure(scripted_judge(), naive_prompt, ANSWERS[:1])
    assert (result["right"], result["wrong"], result["shift"], result["noise"]) == (9.0, 1.0, 8.0, 0.0)
