"""Advantages of the steps of agents: GiGPO, worked out by hand and as a loop in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from astuner.algorithms.call_advantages import anchor_state_advantages
from astuner.algorithms.credit_assignment import StepAdvantages, step_advantages, tasks_with_signal
from astuner.algorithms.registry import resolve
from astuner.config.root import AstunerConfig
from astuner.context_tracker.merge import build_samples
from astuner.errors import BackboneError
from astuner.schema import AgentStep, Episode, LlmCall, Task
from tests.algorithms.published import published_step_advantages

Steps = list[tuple[str, float]]
"""The state and the return of each step."""


def episode(name: str, reward: float, steps: Steps, task: str = "t", agent: str = "") -> Episode:
    calls = tuple(
        LlmCall(
            f"{name}{index}", name, (1, index), (2,), (-1.0,), "stop", agent_name=agent, step=AgentStep(state, value)
        )
        for index, (state, value) in enumerate(steps)
    )
    return Episode(name, Task(task, "?"), 0, "ok", reward, True, calls, samples=tuple(build_samples(calls)))


def config_of(**settings: object) -> AstunerConfig:
    return AstunerConfig.model_validate({"trainer_common": {"algorithm": {"adv_estimator": "gigpo", **settings}}})


def advantages_of(config: AstunerConfig, episodes: list[Episode]) -> StepAdvantages:
    return step_advantages(config, resolve(config.trainer_common.algorithm), episodes, None)


def test_a_worked_example() -> None:
    """Rewards 1 and 0: ±1/√2. Returns 1, 0, 0 from state A: mean 1/3, std 1/√3. State B has one step only."""
    episodes = [episode("a", 1.0, [("A", 1.0), ("B", 1.0)]), episode("b", 0.0, [("A", 0.0), ("A", 0.0)])]
    result = advantages_of(config_of(step_advantage_coef=0.5), episodes)
    whole, step = 1 / math.sqrt(2), 2 / 3 * math.sqrt(3)
    assert result.advantages.tolist() == pytest.approx([whole, -whole], abs=1e-5)
    (first, second) = result.call_advantages
    assert first == pytest.approx({"a0": whole + step / 2, "a1": whole}, abs=1e-5)
    assert second == pytest.approx({"b0": -whole - step / 4, "b1": -whole - step / 4}, abs=1e-5)
    # Without the division: the differences themselves.
    result = advantages_of(config_of(norm_adv_by_std=False), episodes)
    assert result.call_advantages[0] == pytest.approx({"a0": 0.5 + 2 / 3, "a1": 0.5})
    assert result.call_advantages[1] == pytest.approx({"b0": -0.5 - 1 / 3, "b1": -0.5 - 1 / 3})


def test_only_steps_of_one_task_and_one_agent_are_compared() -> None:
    episodes = [
        episode("a", 1.0, [("A", 1.0)]),
        episode("b", 0.0, [("A", 0.0)], task="other"),
        episode("c", 0.0, [("A", 0.0)], agent="someone else"),
    ]
    assert anchor_state_advantages(episodes, True) == [{"a0": 0.0}, {"b0": 0.0}, {"c0": 0.0}]


def test_steps_are_a_signal_where_the_episodes_have_equal_rewards() -> None:
    config = config_of()
    algorithm = resolve(config.trainer_common.algorithm)
    equal = [episode("a", 1.0, [("A", 1.0), ("B", 0.0)]), episode("b", 1.0, [("A", 1.0), ("B", 1.0)])]
    assert advantages_of(config, equal).has_signal.tolist() == [True, True]
    assert tasks_with_signal(config, algorithm, equal) == {"t"}
    equal = [episode("a", 1.0, [("A", 1.0)]), episode("b", 1.0, [("A", 1.0), ("B", 1.0)])]
    assert tasks_with_signal(config, algorithm, equal) == set()
    assert advantages_of(config, equal).call_advantages == [{"a0": 0.0}, {"b0": 0.0, "b1": 0.0}]


def test_a_step_without_states_is_an_error() -> None:
    calls = (LlmCall("c", "e", (1,), (2,), (-1.0,), "stop"),)
    bare = Episode("e", Task("t", "?"), 0, "ok", 1.0, True, calls, samples=tuple(build_samples(calls)))
    with pytest.raises(BackboneError, match=r"or return WorkflowOutput\(steps=...\)"):
        advantages_of(config_of(), [bare])


@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from("ABC"), st.integers(-3, 3).map(float)), min_size=1, max_size=5),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_advantages_are_those_of_the_paper(steps: list[Steps], coef: float) -> None:
    episodes = [
        episode(
            str(number),
            sum(reward for _, reward in own),
            [(state, sum(reward for _, reward in own[index:])) for index, (state, _) in enumerate(own)],
        )
        for number, own in enumerate(steps)
    ]
    result = advantages_of(config_of(step_advantage_coef=coef), episodes)
    for by_call, expected in zip(result.call_advantages, published_step_advantages(steps, coef), strict=True):
        torch.testing.assert_close(
            torch.tensor(list(by_call.values()), dtype=torch.float64),
            torch.tensor(expected).double(),
            rtol=1e-5,
            atol=1e-5,
        )


def test_calls_that_share_tokens_are_separate_rows_if_their_steps_differ() -> None:
    calls = [LlmCall(str(n), "e", (1,), (2,), (-1.0,), "stop", step=AgentStep("A", float(n // 2))) for n in range(4)]
    assert sorted(tuple(sample.train_counts) for sample in build_samples(calls)) == [(0, 2), (0, 2)]
