"""Rewards of agents and of calls."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from astuner import AgentStep, Workflow, WorkflowOutput, WorkflowTask
from astuner.config.data import TaskJudgeConfig
from astuner.context_tracker.audit import certificate
from astuner.errors import UnscoredError, WorkflowError
from astuner.model_tuner.chat_options import CallSettings
from astuner.model_tuner.codec import ChatCodec
from astuner.model_tuner.targets import Targets
from astuner.model_tuner.tuner import ModelTuner
from astuner.schema import Episode, Judgement, Task
from astuner.task_judge.judge_base import BaseJudge
from astuner.task_runner.runner import TaskRunner
from tests.scripted_engine import ScriptedEngine


class TwoAgents(Workflow):
    """A solver and a critic take turns."""

    reward: Any = None
    steps: Any = ()

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        solver, critic = model_tuner.for_agent("solver", "solve"), model_tuner.for_agent("critic", "review")
        for agent in (solver, critic, solver):
            await agent.chat([{"role": "user", "content": f"{agent.agent_name}, speak"}])
        return WorkflowOutput(reward=self.reward, steps=self.steps)


class Answers(BaseJudge):
    """Returns or raises a fixed result."""

    def __init__(self, result: Any) -> None:
        super().__init__(TaskJudgeConfig())
        self.result = result
        self.calls: list[str] = []

    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Any:
        self.calls = [call.agent_name for call in workflow_output.calls]
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


async def run(
    tokenizer: Any,
    reward: Any,
    targets: Targets | None = None,
    judge: BaseJudge | None = None,
    steps: Any = (),
    **settings: Any,
) -> Episode:
    words = iter(["one<|im_end|>", "two<|im_end|>", "three<|im_end|>"])
    engine = ScriptedEngine(
        lambda prompt, params: tokenizer.encode(next(words), add_special_tokens=False), max_model_len=512
    )
    workflow = type("Rewarding", (TwoAgents,), {"reward": reward, "steps": steps})
    codec = ChatCodec(tokenizer, "qwen3")
    runner = TaskRunner(workflow, judge, engine, codec, targets=targets or Targets(), **settings)
    task = WorkflowTask(Task("t", "?"), "e")
    return await runner.run(task, runner.tuner(task, CallSettings()))


async def test_a_mapping_rewards_agents(tokenizer: Any):
    episode = await run(tokenizer, {"solver": 3, "critic": -1.0})
    assert (episode.status, episode.reward, episode.is_success) == ("ok", 1.0, True)
    assert dict(episode.agent_rewards) == {"solver": 3.0, "critic": -1.0}
    assert [(call.agent_name, call.target_tag, call.reward) for call in episode.calls] == [
        ("solver", "solve", 3.0),
        ("critic", "review", -1.0),
        ("solver", "solve", 3.0),
    ]


async def test_a_list_rewards_calls(tokenizer: Any):
    episode = await run(tokenizer, [1, 0, 2])
    assert episode.reward == 1.0
    assert [call.reward for call in episode.calls] == [1.0, 0.0, 2.0]
    assert episode.agent_rewards == {}


@pytest.mark.parametrize("judge", [None, Answers(Judgement(reward=1.0))], ids=["workflow", "judge"])
async def test_calls_have_their_steps(tokenizer: Any, judge: BaseJudge | None):
    steps = [AgentStep("room 1", np.float32(0.5)), None, AgentStep("room 1", 2)]
    episode = await run(tokenizer, None if judge else 1.0, judge=judge, steps=steps)
    first, second, third = (call.step for call in episode.calls)
    assert first is not None
    assert third is not None
    assert (first.step_return, second, third.step_return) == (0.5, None, 2.0)
    assert first.state == third.state != "room 1", "a hash takes the place of the state"
    assert (episode.reward, [call.reward for call in episode.calls]) == (1.0, [None] * 3)


async def test_a_wrong_number_of_steps_fails_the_episode(tokenizer: Any):
    episode = await run(tokenizer, 1.0, steps=[AgentStep("room 1", 0.0)])
    assert (episode.status, episode.error_kind) == ("failed", "workflow")
    assert "has 1 steps, but the episode made 3 LLM calls" in str(episode.error)


def test_invalid_steps_are_errors():
    with pytest.raises(WorkflowError, match=r"WorkflowOutput\.steps must be a list of AgentStep, got \[1\.0\]"):
        WorkflowOutput(1.0, steps=[1.0])
    with pytest.raises(WorkflowError, match=r"AgentStep\.state must be a text, got 7"):
        AgentStep(7, 1.0)
    with pytest.raises(WorkflowError, match=r"AgentStep\.step_return must be a finite number, got nan"):
        AgentStep("room 1", float("nan"))


async def test_numbers_of_other_types_are_rewards(tokenizer: Any):
    assert (await run(tokenizer, Fraction(1, 4))).reward == 0.25
    assert dict((await run(tokenizer, {"solver": Decimal("0.5"), "critic": np.float32(2)})).agent_rewards) == {
        "solver": 0.5,
        "critic": 2.0,
    }
    assert (await run(tokenizer, [Decimal(1), Fraction(1, 2), np.int8(3)])).reward == 1.5


async def test_a_number_rewards_the_episode(tokenizer: Any):
    episode = await run(tokenizer, 0.5)
    assert {call.reward for call in episode.calls} == {None}


async def test_all_merge_modes_drop_the_same_samples(tokenizer: Any):
    trained_calls = []
    for merge in ("leaf", "tree", "none"):
        episode = await run(tokenizer, 1.0, max_samples=2, merge=merge)
        assert episode.dropped_samples == 1
        assert sum(sample.weight for sample in episode.samples) == pytest.approx(1.0)
        trained_calls.append({span.call_id for sample in episode.samples for span in sample.spans})
    assert len(trained_calls[0]) == 2
    assert trained_calls[0] == trained_calls[1] == trained_calls[2]


async def test_frozen_targets_need_no_reward(tokenizer: Any):
    from astuner.model_tuner.targets import FrozenModel

    targets = Targets(("solve",), {"review": FrozenModel()})
    episode = await run(tokenizer, {"solver": 1.0}, targets)
    assert [call.trained for call in episode.calls] == [True, False, True]
    assert [call.reward for call in episode.calls] == [1.0, None, 1.0]
    spans = [span.call_id for sample in episode.samples for span in sample.spans]
    assert sorted(spans) == ["e/0", "e/2"]
    assert certificate(episode.calls, episode.samples) == 1.0


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        ({"solver": 1.0}, "'critic' made LLM calls that are trained: reward every trained agent"),
        ([1.0, 2.0], "has 2 rewards, but the episode made 3 LLM calls"),
    ],
)
async def test_rewards_that_do_not_match_the_calls_fail_the_episode(tokenizer: Any, reward: Any, says: str):
    episode = await run(tokenizer, reward)
    assert (episode.status, episode.reward) == ("failed", None)
    assert says in str(episode.error)
    assert len(episode.calls) == 3


@pytest.mark.parametrize("reward", [{}, [], {"a": float("nan")}, [1.0, "x"], {"a": None}])
def test_invalid_rewards_are_errors(reward: Any):
    with pytest.raises(WorkflowError, match=r"WorkflowOutput\.reward"):
        WorkflowOutput(reward=reward)


async def test_a_judge_rewards_agents_and_calls(tokenizer: Any):
    judge = Answers(Judgement(call_rewards=(1, 0, 2), components={"style": 0.5}))
    episode = await run(tokenizer, None, judge=judge)
    assert judge.calls == ["solver", "critic", "solver"]
    assert (episode.status, episode.reward, episode.is_success) == ("ok", 1.0, True)
    assert [call.reward for call in episode.calls] == [1.0, 0.0, 2.0]
    assert episode.judgement is not None
    assert (episode.judgement.components, episode.samples != ()) == ({"style": 0.5}, True)
    by_agent = await run(tokenizer, None, judge=Answers(Judgement(agent_rewards={"solver": 1, "critic": -1})))
    assert [call.reward for call in by_agent.calls] == [1.0, -1.0, 1.0]
    assert (by_agent.reward, by_agent.agent_rewards) == (0.0, {"solver": 1.0, "critic": -1.0})


@pytest.mark.parametrize(
    ("result", "kind", "error"),
    [
        (Judgement(explanation="the answer has no vote"), "unscored", "the answer has no vote"),
        (Judgement(explanation="none", unscored_cause="no_vote"), "unscored/no_vote", "none"),
        (Judgement(), "unscored", "the judge returned a Judgement without a reward"),
        (UnscoredError("busy", "rate_limit"), "unscored/rate_limit", "busy"),
        (Judgement(call_rewards=(1.0,)), "judge", "Judgement.call_rewards has 1 rewards, but .* 3 LLM calls"),
        (Judgement(agent_rewards={"solver": 1.0}), "judge", "the judge rewards 'solver', but 'critic' made LLM calls"),
    ],
)
async def test_an_unscored_episode_has_no_reward_and_no_samples(tokenizer: Any, result: Any, kind: str, error: str):
    episode = await run(tokenizer, None, judge=Answers(result))
    assert (episode.status, episode.reward, episode.is_success, episode.samples) == ("failed", None, None, ())
    assert (episode.error_kind, len(episode.calls)) == (kind, 3)
    assert re.search(error, episode.error or "")
    assert (episode.judgement is None) is isinstance(result, Exception)
