"""Checks of rewards, each with the fault and without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from astuner.diagnostics.evidence import StepEvidence, answer_is_right, reference
from astuner.schema import Episode, Judgement, Task
from tests.diagnostics.conftest import Evidence, found, make_task


def rewarded(evidence: Evidence, rewards: Any, text: str = r"\boxed{{{}}}") -> list[Episode]:
    """Four tasks of four episodes, half of them right; `rewards` maps whether it is right to the reward."""
    return [
        evidence.episode(make_task(n), r, rewards(r < 2), text.format(n + 1 if r < 2 else n + 50) + "!" * r)
        for n in range(4)
        for r in range(4)
    ]


@pytest.mark.parametrize(
    ("value", "expected"), [("72", "72"), ("a b #### 1,234", "1234"), (3.0, "3"), (True, None), ("x" * 50, None)]
)
def test_the_reference_answer_of_a_task(value: Any, expected: str | None):
    assert reference(Task("t", "?", metadata={"answer": value})) == expected


@pytest.mark.parametrize(
    ("text", "verdict"),
    [(r"so \boxed{13}", True), ("13", True), ("13.", True), ("it is 13, or 14", None), ("113", False), ("12", False)],
)
def test_whether_an_answer_is_right(evidence: Evidence, text: str, verdict: bool | None):
    assert answer_is_right(evidence.episode(make_task(12), 0, 1.0, text), "13") is verdict


def test_a_judge_that_gives_zero_to_all(evidence: Evidence):
    ((message, fix),) = found("right_answers_not_rewarded", evidence.step(rewarded(evidence, lambda right: 0.0)))
    assert "8 of them equal the reference answer" in message
    assert "judge" in fix
    wrong = [evidence.episode(make_task(n), 0, 0.0, "no idea") for n in range(8)]
    assert found("right_answers_not_rewarded", evidence.step(wrong)) == []
    assert found("right_answers_not_rewarded", evidence.step(rewarded(evidence, float))) == []


def test_a_judge_that_gives_one_to_all(evidence: Evidence):
    assert found("wrong_answers_rewarded", evidence.step(rewarded(evidence, lambda right: 1.0)))
    solved = [evidence.episode(make_task(n), 0, 1.0, f"\\boxed{{{n + 1}}}") for n in range(8)]
    assert found("wrong_answers_rewarded", evidence.step(solved)) == []


def test_one_reward_component_for_gdpo(evidence: Evidence):
    def step(algorithm: str, *names: str, **settings: Any) -> StepEvidence:
        start = evidence.start(config={"trainer_common": {"algorithm": {"adv_estimator": algorithm, **settings}}})
        judgement = Judgement(1.0, True, components=dict.fromkeys(names, 1.0))
        return evidence.step([replace(e, judgement=judgement) for e in evidence.ordinary()], start=start)

    ((message, fix),) = found("one_reward_component", step("gdpo"))
    assert "have no component" in message
    assert "write trainer_common.algorithm.adv_estimator: grpo" in fix
    assert "have only correct" in found("one_reward_component", step("gdpo", "correct", "correct.part"))[0][0]
    chosen = step("gdpo", "correct", "brief", component_weights={"correct": 1.0})
    assert "have only correct" in found("one_reward_component", chosen)[0][0]
    assert found("one_reward_component", step("gdpo", "correct", "brief")) == []
    assert found("one_reward_component", step("grpo")) == []


def test_rewards_that_are_inverted(evidence: Evidence):
    inverted = rewarded(evidence, lambda right: float(not right))
    assert "inverted" in found("rewards_contradict_answers", evidence.step(inverted))[0][0]
    assert found("rewards_contradict_answers", evidence.step(rewarded(evidence, float))) == []
    # Too few to exclude chance.
    assert found("rewards_contradict_answers", evidence.step(inverted[:4])) == []


def test_a_judge_that_fails(evidence: Evidence):
    error = "the reward must be a finite number, got nan"
    failed = [replace(e, status="failed", reward=None, error_kind="judge", error=error) for e in evidence.ordinary()]
    ((message, fix),) = found("judge_fails", evidence.step(failed))
    assert "16 of 16 episodes have no reward" in message
    assert "division by 0" in fix
    assert found("judge_fails", evidence.step([*failed[:4], *evidence.ordinary()[4:]])) == []
    crashed = [replace(e, error_kind="workflow", error="OSError: it broke") for e in failed]
    assert found("judge_fails", evidence.step(crashed)) == []


def test_crashes_that_are_rewarded(evidence: Evidence):
    crash = {"error": "ConnectionError('the sandbox is not reachable')"}
    crashed = [replace(episode, metadata=crash) for episode in evidence.ordinary()]
    assert "16 of 16 episodes crashed" in found("crashes_are_rewarded", evidence.step(crashed))[0][0]
    for harmless in ({"error": "no answer found"}, {"error": None}, {"final_answer": "ValueError: x"}):
        episodes = [replace(episode, metadata=harmless) for episode in evidence.ordinary()]
        assert found("crashes_are_rewarded", evidence.step(episodes)) == []


def test_a_judge_whose_rewards_differ_for_the_same_conversation(evidence: Evidence):
    def episodes(reward: Any) -> list[Episode]:
        return [evidence.episode(make_task(n), r, reward(n, r), "the same") for n in range(4) for r in range(4)]

    assert found("judge_is_inconsistent", evidence.step(episodes(lambda n, r: float(r % 2))))
    # The reward depends on the task only, or varies a little as that of a model does.
    assert found("judge_is_inconsistent", evidence.step(episodes(lambda n, r: float(n)))) == []
    assert found("judge_is_inconsistent", evidence.step(episodes(lambda n, r: n + r / 10))) == []


def test_long_ids_are_shortened_in_findings(evidence: Evidence):
    def with_long_ids(episode: Episode) -> Episode:
        calls = [replace(call, call_id=f"{call.call_id}{'x' * 100_000}") for call in episode.calls]
        return replace(episode, episode_id=f"{episode.episode_id}{'x' * 100_000}", calls=tuple(calls))

    crash = {"error": "ConnectionError('the sandbox is not reachable')"}
    same = [evidence.episode(make_task(n), r, float(r % 2), "the same") for n in range(4) for r in range(4)]
    copies = [
        evidence.episode(
            make_task(n),
            0,
            1.0,
            calls=(
                evidence.call(
                    f"e{n}",
                    [{"role": "user", "content": f"{n}?"}],
                    "an answer of ten",
                    logprobs=lambda p: -0.1 * (p + 1),
                ),
            ),
        )
        for n in range(3)
    ]
    cases = {
        "right_answers_not_rewarded": rewarded(evidence, lambda right: 0.0),
        "wrong_answers_rewarded": rewarded(evidence, lambda right: 1.0),
        "crashes_are_rewarded": [replace(episode, metadata=crash) for episode in evidence.ordinary()],
        "judge_is_inconsistent": same,
        "mask_differs_from_calls": evidence.ordinary(),  # the samples have other call ids now
        "answers_of_other_prompts": copies,
    }
    for name, episodes in cases.items():
        ((message, _),) = found(name, evidence.step(list(map(with_long_ids, episodes))))
        assert len(message) < 2_000, name
