"""The agent loop: steps, ends of episodes, actions that cannot be read, seats and rewards."""

from __future__ import annotations

from typing import Any

import pytest

from astuner import discounted_returns
from astuner.context_tracker.audit import certificate
from astuner.model_tuner.targets import Targets
from astuner.schema import EnvTask, Episode, Evaluation, StepResult
from astuner.task_judge.judge_base import BaseJudge
from astuner.workflows.agent_loop.workflow import LoopSettings
from tests.workflows.agent_loop.conftest import Corridor, CorridorWithTools, HighCard, Play


def texts(episode: Episode, call: int = -1) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in episode.calls[call].messages]


def test_an_environment_is_played_to_its_end(play: Play) -> None:
    corridor = Corridor()
    episode = play(corridor, ["right", "left", "right", "right", " right\n", "right"])
    assert (episode.status, episode.reward, episode.is_success) == ("ok", 1.0, True)
    assert corridor.actions == ["right", "left", "right", "right", "right", "right"]
    assert texts(episode, 1) == [
        ("system", "You walk."),
        ("user", "Walk to the goal.\n\nYou are at 0."),
        ("assistant", "right"),
        ("user", "You are at 1."),
        ("assistant", "left"),
    ]
    assert len(episode.samples) == 1
    assert certificate(episode.calls, episode.samples) == 1.0
    assert all(call.trained and call.fork is None and call.reward is None for call in episode.calls)
    assert episode.log_metrics == {
        "env_steps": 6, "env_return": 1.0, "invalid_actions": 0, "unreadable_actions": 0,
    }  # fmt: skip
    assert episode.metadata == {"ended_by": "environment", "final_answer": "right", "scores": {"": 1.0}}


def test_calls_have_the_observation_and_the_return_of_their_step(play: Play) -> None:
    answers = ["right", "left", "?", "right", "right", "right", "right"]
    episode = play(Corridor(), answers, settings=LoopSettings("text", gamma=0.5))
    steps = [call.step for call in episode.calls]
    places = {step.state: None for step in steps}
    assert [list(places).index(step.state) for step in steps] == [0, 1, 0, 0, 1, 2, 3]
    rewards = [0.25, -0.25, 0.0, 0.25, 0.25, 0.25, 0.25]
    assert [step.step_return for step in steps] == discounted_returns(rewards, 0.5)
    assert episode.reward == steps[0].step_return
    assert discounted_returns([1.0, 0.0, 2.0], 0.5) == [1.5, 1.0, 2.0]


def test_an_action_that_the_environment_rejects_is_counted(play: Play) -> None:
    episode = play(Corridor(), ["jump", "right", "right", "right", "right"])
    assert (episode.reward, episode.log_metrics["invalid_actions"], episode.log_metrics["env_steps"]) == (1.0, 1, 5)


def test_an_answer_without_an_action_costs_a_turn_and_the_model_is_told(play: Play) -> None:
    corridor = Corridor()
    answers = ["right", *[r"\boxed{right}"] * 2, "?", r"so \boxed{right}"]
    episode = play(corridor, answers, settings=LoopSettings("box"), max_calls=5)
    assert corridor.actions == ["right"] * 3
    assert (episode.reward, episode.is_success) == (0.75, False)
    assert episode.log_metrics["unreadable_actions"] == 2
    assert (episode.error_kind, episode.metadata["ended_by"]) == ("max_steps", "max_steps")
    told = "Your answer contains no action. Write exactly one action as \\boxed{action}. Nothing has happened."
    conversation = texts(episode)
    assert conversation[1] == ("user", "Walk to the goal.\n\nWrite your action as \\boxed{action}.\n\nYou are at 0.")
    assert conversation[3] == ("user", f"{told}\n\nYou are at 0.")
    assert conversation[9] == ("user", f"{told}\n\nYou are at 2.")
    assert len(episode.samples) == 1


def test_tools_of_the_environment_are_the_actions(play: Play) -> None:
    corridor = CorridorWithTools()
    preference = EnvTask("corridor", "train", action_preference="code")
    call = '<tool_call>\n{"name": "go", "arguments": {"to": "right"}}\n</tool_call>'
    episode = play(corridor, [call, "I walk.", f"{call}\n{call}", call, call, call], env_task=preference)
    assert corridor.actions == [{"name": "go", "arguments": {"to": "right"}}] * 4
    assert (episode.reward, episode.log_metrics["unreadable_actions"]) == (1.0, 2)
    conversation = texts(episode)
    assert conversation[3] == ("tool", "You are at 1.")
    assert conversation[5][0] == "user"
    assert conversation[5][1].startswith("Your answer contains no tool call. Answer with exactly one tool call.")
    # Each of the two calls has a result.
    assert [role for role, _ in conversation[7:10]] == ["tool", "tool", "assistant"]
    assert conversation[7] == conversation[8]
    assert "contains 2 tool calls" in conversation[7][1]
    assert all(call.fork is None for call in episode.calls)
    assert certificate(episode.calls, episode.samples) == 1.0


def test_an_environment_without_tools_gets_a_tool_for_its_actions(play: Play) -> None:
    corridor = Corridor()
    call = '<tool_call>\n{"name": "act", "arguments": {"action": "right"}}\n</tool_call>'
    wrong = '<tool_call>\n{"name": "walk", "arguments": {"action": "right"}}\n</tool_call>'
    malformed = '<tool_call>\n{"name": "act", "arg\n</tool_call>'
    episode = play(corridor, [wrong, call, malformed, call, call, call], settings=LoopSettings("tool_call"))
    assert corridor.actions == ["right"] * 4
    assert (episode.reward, episode.log_metrics["unreadable_actions"]) == (1.0, 2)


@pytest.mark.parametrize(
    ("environment", "preference", "answer"),
    [
        (CorridorWithTools, "text", "right"),
        (CorridorWithTools, "box", r"\boxed{right}"),
        (Corridor, "code", "```text\nright\n```"),
    ],
)
def test_the_task_may_prefer_a_form_of_actions(play: Play, environment: Any, preference: Any, answer: str) -> None:
    episode = play(environment(), [answer], env_task=EnvTask("a", "train", action_preference=preference), max_calls=1)
    assert (episode.log_metrics["env_steps"], episode.log_metrics["unreadable_actions"]) == (1, 0)


def test_a_limit_of_calls_ends_the_episode_with_the_rewards_so_far(play: Play) -> None:
    episode = play(Corridor(), ["right"] * 2, max_calls=2)
    assert (episode.status, episode.reward, episode.is_success, episode.error_kind) == ("ok", 0.5, False, "max_steps")
    failed = play(Corridor(), ["right"] * 2, max_calls=2, on_max_steps="fail")
    assert (failed.status, failed.error_kind) == ("failed", "max_steps")
    exact = play(Corridor(), ["right"] * 4, max_calls=4, on_max_steps="fail")
    assert (exact.status, exact.error_kind, exact.reward) == ("ok", None, 1.0)


def test_a_full_context_ends_the_episode_unless_the_first_prompt_fills_it(play: Play) -> None:
    class Talkative(Corridor):
        def step(self, action: Any) -> StepResult:
            result = super().step(action)
            return StepResult(type(result.observation)("what " * 500), result.reward)

    episode = play(Talkative(), ["right"] * 2, max_model_len=400)
    assert (episode.status, episode.reward, episode.metadata["ended_by"]) == ("ok", 0.25, "context_length")
    failed = play(Talkative(), ["right"], max_prompt_length=10)
    assert (failed.status, failed.error_kind) == ("failed", "context_length")
    assert "data.max_prompt_length" in str(failed.error)


def test_a_task_without_an_environment_fails(play: Play) -> None:
    episode = play(None, [])
    assert (episode.status, episode.error_kind) == ("failed", "workflow")
    assert "task task has no environment; set task_reader.type: env_service, or name a workflow" in str(episode.error)


def test_an_error_of_the_environment_fails_the_episode(play: Play) -> None:
    class Broken(Corridor):
        def step(self, action: Any) -> StepResult:
            raise ZeroDivisionError("the floor is missing")

    episode = play(Broken(), ["right"])
    assert episode.status == "failed"
    assert "the floor is missing" in str(episode.error)
    assert len(episode.calls) == 1


class HalfPoints(BaseJudge):
    def __init__(self) -> None:
        pass

    async def compute_reward(self, workflow_task: Any, workflow_output: Any) -> tuple[float, bool]:
        evaluation: Evaluation = await workflow_task.env.evaluate()
        assert isinstance(evaluation.score, float)
        return evaluation.score / 2, workflow_output.metadata["final_answer"] == "right"


def test_a_judge_replaces_the_rewards_of_the_steps(play: Play) -> None:
    episode = play(Corridor(), ["right"] * 4, judge=HalfPoints())
    assert (episode.reward, episode.is_success, episode.log_metrics["env_return"]) == (0.5, True, 1.0)


@pytest.mark.parametrize(
    ("gamma", "total", "returns"),
    [(1.0, 0.75, [0.75, 0.5, 0.75, 0.5, 0.25]), (0.5, 0.234375, [0.234375, -0.03125, 0.4375, 0.375, 0.25])],
)
def test_rewards_of_steps_are_discounted(play: Play, gamma: float, total: float, returns: list[float]) -> None:
    """The steps have the rewards 0.25, -0.25, 0.25, 0.25 and 0.25."""
    answers = ["right", "left", "right", "right", "right"]
    episode = play(Corridor(), answers, settings=LoopSettings(gamma=gamma), max_calls=5)
    assert episode.reward == total
    assert {call.reward for call in episode.calls} == {None}
    episode = play(Corridor(), answers, settings=LoopSettings(gamma=gamma, step_rewards="returns_to_go"), max_calls=5)
    assert [call.reward for call in episode.calls] == returns
    assert episode.reward == sum(returns) / 5


def test_each_seat_is_an_agent_with_its_own_history_and_reward(play: Play) -> None:
    episode = play(HighCard(), ["1", "5", "2", "3", "4", "2"])
    assert [call.agent_name for call in episode.calls] == ["north", "east", "south"] * 2
    assert [call.target_tag for call in episode.calls] == ["north", "east", "south"] * 2
    assert texts(episode, 4) == [
        ("user", "Say a high number.\n\neast, round 0."),
        ("assistant", "5"),
        ("user", "east, round 1."),
        ("assistant", "4"),
    ]
    assert episode.agent_rewards == {"east": 2.0, "north": -1.0, "south": -1.0}
    assert [call.reward for call in episode.calls] == [-1.0, 2.0, -1.0] * 2
    assert certificate(episode.calls, episode.samples) == 1.0
    assert (len(episode.samples), episode.is_success) == (3, False)


def test_only_trained_seats_count(play: Play) -> None:
    from astuner.model_tuner.targets import FrozenModel

    frozen = {"north": FrozenModel(), "south": FrozenModel()}
    episode = play(HighCard(), ["1", "5", "2", "3", "4", "2"], targets=Targets(("east",), frozen))
    assert (episode.agent_rewards, episode.reward, episode.is_success) == ({"east": 2.0}, 2.0, True)
    assert [call.trained for call in episode.calls] == [False, True, False] * 2


def test_the_rewards_of_a_seat_belong_to_its_own_turns(play: Play) -> None:
    settings = LoopSettings(step_rewards="returns_to_go", gamma=0.5)
    episode = play(HighCard(), ["1", "5", "2", "3", "4", "2"], settings=settings)
    assert [call.reward for call in episode.calls] == [-0.5, 1.0, -0.5, -1.0, 2.0, -1.0]
