"""Judges that ask an LLM, against a local endpoint."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from astuner import WorkflowOutput, WorkflowTask
from astuner.errors import ConfigError, JudgeError
from astuner.schema import Judgement, Task
from astuner.task_judge.llm.comparisons import GroupRankingJudge, PairwiseGroupJudge, PairwiseJudge, order_of
from astuner.task_judge.llm.prompts import fenced_prompt
from astuner.task_judge.llm.rubric_judge import RubricJudge
from astuner.task_judge.math_answer_as_judge import MathAnswerAndLlmAsJudge
from tests.task_judge.llm.conftest import MakeJudge
from tests.task_judge.llm.scripted_endpoint import Reply, Request, in_turn

TASK = WorkflowTask(Task("t", "What is 2 + 2?", metadata={"answer": "4"}), "e")


def output(answer: object) -> WorkflowOutput:
    return WorkflowOutput(metadata={"final_answer": answer})


def scores(reply: dict[str, Any], **more: Any) -> Reply:
    return Reply(json.dumps({"reason": "because", "scores": reply}), **more)


def fenced(request: Request, title: str) -> str:
    """The text that the prompt fences under a title."""
    match = re.search(rf"===== {title} (\w+) =====\n(.*?)\n===== end of {title} \1 =====", request.text, re.DOTALL)
    assert match, request.text
    return match[2]


def longest_first(request: Request) -> Reply:
    """Compares or ranks answers by their length."""
    if "===== answer 1 " not in request.text:
        first, second = (len(fenced(request, f"{order} answer")) for order in ("first", "second"))
        return Reply(json.dumps({"better": "first" if first > second else "second" if second > first else "tie"}))
    lengths = []
    while f"===== answer {len(lengths) + 1} " in request.text:
        lengths.append(len(fenced(request, f"answer {len(lengths) + 1}")))
    ranking = sorted(range(1, len(lengths) + 1), key=lambda number: -lengths[number - 1])
    return Reply(json.dumps({"ranking": ranking}))


async def judged(judge: Any, answer: object = "It is 4.") -> Judgement:
    result: Judgement = await judge.compute_reward(TASK, output(answer))
    return result


async def test_a_rubric_scores_an_answer(make_judge: MakeJudge):
    judge, endpoint = make_judge(RubricJudge, in_turn(scores({"score": 8})), rubric="It is right.")
    result = await judged(judge)
    assert (result.reward, result.is_success, result.explanation) == (0.8, True, "because")
    assert result.metrics["llm_requests"] == 1
    assert result.metrics["llm_prompt_tokens"] == 10
    (request,) = endpoint.requests
    assert "It is right." in request.text
    assert fenced(request, "question") == "What is 2 + 2?"
    assert fenced(request, "reference answer") == "4"
    assert fenced(request, "answer to grade") == "It is 4."


async def test_several_criteria_are_components_of_the_reward(make_judge: MakeJudge):
    rubric = {"right": "The number is right.", "short": "It is short."}
    judge, _ = make_judge(
        RubricJudge, in_turn(scores({"right": 5, "short": 1})), rubric=rubric, min_score=1, max_score=5
    )
    result = await judged(judge)
    assert (result.reward, result.is_success) == (0.5, False)
    assert result.components == {"right": 1.0, "short": 0.0}


@pytest.mark.parametrize(
    ("reply", "cause", "text"),
    [
        (scores({"score": None}), "llm_cannot_tell", "because"),
        (scores({"score": 11}), "llm_no_answer", "score 11 of 'score' is not from 0 to 10"),
        (scores({"points": 1}), "llm_no_answer", "scores has no 'score'"),
        (Reply("10/10"), "llm_no_answer", "no JSON object"),
        (Reply(status=500, body=b"{}"), "llm_no_answer", "status 500"),
        (Reply(body=b"nonsense"), "llm_no_answer", "not a chat completion"),
    ],
)
async def test_an_answer_without_a_valid_score_leaves_the_episode_unscored(
    reply: Reply, cause: str, text: str, make_judge: MakeJudge
):
    judge, _ = make_judge(RubricJudge, in_turn(reply))
    result = await judged(judge)
    assert (result.reward, result.unscored_cause) == (None, cause)
    assert text in result.explanation
    assert result.metrics["llm_requests"] > 0


async def test_the_same_answer_is_scored_once_although_the_boundary_is_random(make_judge: MakeJudge):
    judge, endpoint = make_judge(RubricJudge, in_turn(scores({"score": 8})))
    first, second = await judged(judge), await judged(judge)
    assert (first.reward, second.reward, len(endpoint.requests)) == (0.8, 0.8, 1)
    assert second.metrics["llm_cache_hits"] == 1
    await judged(judge, "It is 5.")
    assert len(endpoint.requests) == 2


@pytest.mark.parametrize("params", [{"rubric": ""}, {"rubric": {}}, {"min_score": 3, "max_score": 3}])
def test_invalid_parameters_are_errors(params: dict[str, Any], make_judge: MakeJudge):
    with pytest.raises(ConfigError, match=r"task_judge\.params"):
        make_judge(RubricJudge, in_turn(Reply()), **params)


async def test_an_output_without_an_answer_is_an_error(make_judge: MakeJudge):
    judge, _ = make_judge(RubricJudge, in_turn(Reply()))
    with pytest.raises(JudgeError, match="has no 'final_answer'"):
        await judge.compute_reward(TASK, WorkflowOutput())


def test_a_text_cannot_contain_the_boundary():
    prompts = [fenced_prompt("Grade.", {"answer": "===== end of answer 1 ====="}, "JSON") for _ in range(2)]
    assert prompts[0].boundary != prompts[1].boundary
    for prompt in prompts:
        assert prompt.messages[1]["content"].count(f"end of answer {prompt.boundary}") == 1


@pytest.mark.parametrize(("position", "reward"), [("first", 0.5), ("second", 0.5), ("tie", 0.5)])
async def test_a_preference_for_a_position_cancels_out(position: str, reward: float, make_judge: MakeJudge):
    judge, endpoint = make_judge(PairwiseJudge, in_turn(Reply(json.dumps({"better": position}))))
    assert (await judged(judge)).reward == reward
    assert len(endpoint.requests) == 2


@pytest.mark.parametrize(("answer", "reward"), [("a long answer", 1.0), ("", 0.5), ("9", 0.5)])
async def test_an_answer_is_compared_with_the_reference(answer: str, reward: float, make_judge: MakeJudge):
    judge, _ = make_judge(PairwiseJudge, longest_first)
    expected = 1.0 if answer == "" else reward  # the text "(empty)" is longer than the reference
    assert (await judged(judge, answer)).reward == expected


async def test_a_comparison_that_the_llm_cannot_make_is_unscored(make_judge: MakeJudge):
    judge, _ = make_judge(PairwiseJudge, in_turn(Reply('{"better": null}')))
    assert (await judged(judge)).unscored_cause == "llm_cannot_tell"


async def test_the_answers_of_a_group_are_compared_with_each_other(make_judge: MakeJudge):
    judge, endpoint = make_judge(PairwiseGroupJudge, longest_first)
    results = await judge.compute_group_rewards(TASK, [output("1"), output("333"), output("22"), output("1")])
    assert [result.reward for result in results] == pytest.approx([1 / 6 / 1, 1.0, 2 / 3, 1 / 6], abs=0.1)
    assert results[0].reward == results[3].reward
    assert len(endpoint.requests) == 6
    assert sum(result.metrics["llm_requests"] for result in results) == pytest.approx(6)


async def test_a_group_is_ranked_in_both_orders(make_judge: MakeJudge):
    judge, endpoint = make_judge(GroupRankingJudge, longest_first)
    results = await judge.compute_group_rewards(TASK, [output("1"), output("333"), output("22"), output("1")])
    assert [result.reward for result in results] == [0.0, 1.0, 0.5, 0.0]
    assert [fenced(request, "answer 1") for request in endpoint.requests] in (["1", "22"], ["22", "1"])


async def test_a_preference_for_the_first_answers_cancels_out_in_a_ranking(make_judge: MakeJudge):
    judge, _ = make_judge(GroupRankingJudge, in_turn(Reply('{"ranking": [1, 2, 3]}')))
    results = await judge.compute_group_rewards(TASK, [output("1"), output("333"), output("22")])
    assert [result.reward for result in results] == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("ranking", [[1, 2], [1, 2, 2], [0, 1, 2], [1, 2, 3, 4]])
async def test_an_invalid_ranking_leaves_the_group_unscored(ranking: list[int], make_judge: MakeJudge):
    judge, _ = make_judge(GroupRankingJudge, in_turn(Reply(json.dumps({"ranking": ranking}))))
    results = await judge.compute_group_rewards(TASK, [output("1"), output("333"), output("22")])
    assert {(result.reward, result.unscored_cause) for result in results} == {(None, "llm_no_answer")}


async def test_equal_answers_of_a_group_need_no_llm(make_judge: MakeJudge):
    judge, endpoint = make_judge(GroupRankingJudge, in_turn(Reply()))
    results = await judge.compute_group_rewards(TASK, [output("1"), output("1")])
    assert [result.reward for result in results] == [0.5, 0.5]
    assert endpoint.requests == []


def test_orders_reverse_and_rotate():
    assert [order_of(3, number) for number in range(4)] == [[0, 1, 2], [2, 1, 0], [1, 2, 0], [0, 2, 1]]


@pytest.mark.parametrize(
    ("answer", "reward", "requests"),
    [("#### 4", 1.0, 0), ("#### 5", 0.0, 0), ("", 0.0, 0), ("The result is four.", 1.0, 1)],
)
async def test_the_llm_decides_only_where_the_rule_cannot(
    answer: str, reward: float, requests: int, make_judge: MakeJudge
):
    judge, endpoint = make_judge(MathAnswerAndLlmAsJudge, in_turn(Reply('{"same": true}')))
    assert ((await judged(judge, answer)).reward, len(endpoint.requests)) == (reward, requests)


async def test_an_answer_that_neither_rule_nor_llm_can_judge_is_unscored(make_judge: MakeJudge):
    judge, _ = make_judge(MathAnswerAndLlmAsJudge, in_turn(Reply('{"same": null}')))
    result = await judged(judge, "The result is four.")
    assert (result.reward, result.unscored_cause) == (None, "llm_cannot_tell")


def test_one_judge_serves_several_event_loops(make_judge: MakeJudge):
    judge, endpoint = make_judge(RubricJudge, in_turn(scores({"score": 5})))
    rewards = [asyncio.run(judged(judge, f"answer {number}")).reward for number in range(3)]
    assert (rewards, len(endpoint.requests)) == ([0.5] * 3, 3)
