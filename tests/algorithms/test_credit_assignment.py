"""Advantages of agents and of calls, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astuner.algorithms.call_advantages import advantages_by_call
from astuner.algorithms.credit_assignment import StepAdvantages, step_advantages, tasks_with_signal
from astuner.algorithms.registry import ReinforcementRule, resolve
from astuner.algorithms.training_rows import TrainingRow
from astuner.config.algorithm_settings import AlgorithmConfig
from astuner.config.algorithms import ALGORITHMS
from astuner.config.root import AstunerConfig
from astuner.context_tracker.audit import response_length
from astuner.context_tracker.merge import MergeMode, build_samples
from astuner.errors import BackboneError
from astuner.schema import AgentStep, Episode, Fork, Judgement, LlmCall, Task
from tests.context_tracker.test_merge import forests
from tests.examples import examples


def rule_of(algorithm: str) -> ReinforcementRule:
    rule = resolve(AlgorithmConfig.model_validate({"adv_estimator": algorithm})).rule
    assert rule is not None
    return rule


rule = rule_of("dr_grpo")


def call(name: str, agent: str = "", reward: float | None = None) -> LlmCall:
    return LlmCall(name, "e", (1,), (2,), (-1.0,), "stop", agent_name=agent, reward=reward)


def episode(reward: float, *calls: LlmCall, **agents: float) -> Episode:
    return Episode("e", Task("t", "?"), 0, "ok", reward, True, calls, agent_rewards=agents)


GROUP = torch.zeros(3, dtype=torch.int64)


def test_agents_are_compared_across_episodes():
    """In a zero-sum game, the mean reward of every episode is 0, but the agents' rewards differ."""
    episodes = [
        episode(0.0, call("a0", "a", 1.0), call("b0", "b", -1.0), a=1.0, b=-1.0),
        episode(0.0, call("a1", "a", -1.0), call("b1", "b", 1.0), a=-1.0, b=1.0),
        episode(0.0, call("a2", "a", 0.0), call("b2", "b", 0.0), a=0.0, b=0.0),
    ]
    by_call = advantages_by_call(rule, episodes, torch.zeros(3), GROUP, torch.ones(3))
    assert by_call == [{"a0": 1.0, "b0": -1.0}, {"a1": -1.0, "b1": 1.0}, {"a2": 0.0, "b2": 0.0}]


def test_agent_that_is_missing_in_an_episode():
    episodes = [
        episode(2.0, call("a0", "a", 2.0), a=2.0),
        episode(9.0, call("b1", "b", 9.0), b=9.0),
        episode(4.0, call("x2")),
    ]
    by_call = advantages_by_call(rule, episodes, torch.zeros(3), GROUP, torch.ones(3))
    # `a` and `b` are compared with the reward of the third episode, which has no rewards by agent or call.
    assert by_call == [{"a0": -1.0}, {"b1": 2.5}, {}]


def test_call_has_the_advantage_of_an_episode_with_its_reward():
    episodes = [
        episode(2.0, call("c0", reward=0.0), call("c1", reward=4.0), call("c2", reward=4.0)),
        episode(1.0, call("d0")),
        episode(3.0, call("e0")),
    ]
    by_call = advantages_by_call(rule, episodes, torch.tensor([1.0, 0.0, 0.0]), GROUP, torch.ones(3))
    # With the shaping, 0 becomes 1 of a group (1, 1, 3), and 4 becomes 5 of a group (5, 1, 3).
    assert by_call == [{"c0": pytest.approx(1 - 5 / 3), "c1": 2.0, "c2": 2.0}, {}, {}]


def test_call_is_divided_by_the_std_of_the_episodes_rewards():
    """Four episodes with rewards 0.5, 0, 0, 0: mean 0.125, std √((0.375² + 3 × 0.125²) / 3) = 0.25."""
    calls = (call("c0", reward=0.0), call("c1", reward=0.01), call("c2", reward=1.49))
    episodes = [episode(0.5, *calls), *[episode(0.0, call(f"d{index}")) for index in range(3)]]
    group = torch.zeros(4, dtype=torch.int64)
    (by_call, *others) = advantages_by_call(rule_of("grpo"), episodes, torch.zeros(4), group, torch.ones(4))
    # Three quarters of the rewards, divided by 0.25.
    assert by_call == {
        "c0": 0.0,
        "c1": pytest.approx(0.03, rel=1e-4),
        "c2": pytest.approx(4.47, rel=1e-4),
    }
    assert others == [{}, {}, {}]
    # RLOO subtracts the mean of the others, which is 0. REINFORCE++ takes mean and std over the whole batch.
    by_std = replace(rule_of("rloo"), norm_adv_by_std=True)
    assert advantages_by_call(by_std, episodes, torch.zeros(4), group, torch.ones(4))[0]["c2"] == pytest.approx(
        5.96, rel=1e-4
    )
    apart = torch.arange(4)
    assert advantages_by_call(rule_of("reinforce++"), episodes, torch.zeros(4), apart, torch.ones(4))[0][
        "c2"
    ] == pytest.approx(4.47, rel=1e-4)


def test_mean_advantage_of_an_episodes_calls_is_that_of_the_episode():
    rewards = torch.tensor([0.5, 0.25, 1.0])
    episodes = [episode(0.5, *[call(f"c{index}", reward=value) for index, value in enumerate((0.0, 0.25, 1.25))])]
    episodes += [episode(0.25, call("d")), episode(1.0, call("e"))]
    for algorithm in ("grpo", "dr_grpo", "rloo", "reinforce++", "gspo", "cispo", "dapo"):
        advantages = rule_of(algorithm).advantages(rewards, GROUP)
        by_call = advantages_by_call(rule_of(algorithm), episodes, torch.zeros(3), GROUP, torch.ones(3))[0]
        assert sum(by_call.values()) / 3 == pytest.approx(float(advantages[0]), abs=1e-6)


def test_equal_episodes_with_unequal_calls_have_bounded_advantages():
    """All episodes have reward 0.5; the calls of one have 0 and 1.

    The std of the calls is √(0.25 / 2), of which a tenth divides, and the centred rewards are ∓ 0.5 × 2/3.
    """
    episodes = [episode(0.5, call("c0", reward=0.0), call("c1", reward=1.0))]
    episodes += [episode(0.5, call("d")), episode(0.5, call("e"))]
    by_call = advantages_by_call(rule_of("grpo"), episodes, torch.zeros(3), GROUP, torch.ones(3))[0]
    assert by_call == {"c0": pytest.approx(-9.428, rel=1e-3), "c1": pytest.approx(9.428, rel=1e-3)}


def advantages_of(algorithm: str, forest: list[list[LlmCall]], merge: MergeMode) -> StepAdvantages:
    config = AstunerConfig.model_validate(
        {
            "data": {"max_response_length": 9},
            "trainer_common": {
                "algorithm": {"adv_estimator": algorithm, "overlong_buffer_length": 0 if algorithm == "maxrl" else 8}
            },
        }
    )
    episodes = []
    for index, calls in enumerate(forest):
        samples = tuple(build_samples(calls, merge))
        episodes.append(
            Episode(f"e{index}", Task("t", "?"), index, "ok", float(index % 2), True, tuple(calls), samples)
        )
    return step_advantages(config, resolve(config.trainer_common.algorithm), episodes, None)


@settings(max_examples=examples(30))
@given(
    st.sampled_from([name for name in ALGORITHMS if name != "sft"]),
    st.lists(forests(), min_size=2, max_size=4),
)
def test_rewards_and_advantages_do_not_depend_on_the_samples(algorithm: str, forest: list[list[LlmCall]]):
    forest = [
        [replace(made, prompt_ids=made.prompt_ids or (1,), step=AgentStep("start", 0.0)) for made in calls]
        for calls in forest
    ]
    by_call, by_timeline, by_tree = (advantages_of(algorithm, forest, merge) for merge in ("none", "leaf", "tree"))
    for other in (by_timeline, by_tree):
        assert torch.equal(other.rewards, by_call.rewards)
        assert torch.equal(other.advantages, by_call.advantages)
        assert torch.equal(other.has_signal, by_call.has_signal)
        assert other.call_advantages == by_call.call_advantages


def timed(name: str, prompt: list[int], answer: list[int], fork: str | None = None) -> LlmCall:
    made = LlmCall(name, "e", tuple(prompt), tuple(answer), (-1.0,) * len(answer), "stop")
    return made if fork is None else replace(made, fork=Fork("truncated", fork, 0, (), (), "", "", 0))


def test_response_length_of_conversations():
    first = timed("a", [1, 2], [3])
    second = timed("b", [1, 2, 3, 4], [5, 6])
    assert response_length([first]) == 1
    assert response_length([first, second]) == 4
    # Two continuations of the same call: the longer one counts.
    assert response_length([first, second, timed("c", [1, 2, 3, 9, 9], [5, 6, 7])]) == 6
    # A fork belongs to the conversation of the call that it should have extended.
    assert response_length([first, second, timed("c", [1, 7, 8, 9, 9, 9], [5, 6], fork="b")]) == 6
    # The prompt of another conversation begins with the same prompt, but not with the answer.
    assert response_length([first, timed("c", [1, 2, 8, 8, 8, 8], [5])]) == 1
    # A context that is not trained extends the conversation, and an external model's call has no tokens.
    external = replace(timed("x", [], []), trained=False)
    assert response_length([external, first, replace(second, trained=False)]) == 1
    assert response_length([external, replace(first, trained=False), second]) == 4
    assert response_length([external]) == 0


def judged(task: str, *components: float, reward: float | None = None, **more: float) -> Episode:
    parts = dict(zip("ab", components, strict=False)) | {name.replace("_", "."): value for name, value in more.items()}
    total = sum(components) if reward is None else reward
    judgement = Judgement(total, True, parts) if parts else None
    return Episode("e", Task(task, "?"), 0, "ok", total, True, (call(task),), judgement=judgement)


def gdpo(episodes: list[Episode], **settings: object) -> StepAdvantages:
    config = AstunerConfig.model_validate(
        {"trainer_common": {"algorithm": {"adv_estimator": "gdpo", **settings}}, "data": {"max_response_length": 10}}
    )
    return step_advantages(config, resolve(config.trainer_common.algorithm), episodes, None)


def test_components_are_normalised_separately():
    """As in `test_decoupled_rewards_hand_worked`."""
    episodes = [judged("t", 1, 10), judged("t", 0, 0), judged("u", 1, 3, a_x=5), judged("u", 0, 3, a_x=-5)]
    result = gdpo(episodes)
    assert result.advantages.tolist() == pytest.approx([1.09545, -1.09545, 0.54772, -0.54772], abs=1e-5)
    weighted = gdpo(episodes, component_weights={"a": 1, "b": -0.5})
    assert weighted.advantages.tolist() == pytest.approx([0.54772, -0.54772, 1.09545, -1.09545], abs=1e-5)
    only = gdpo(episodes, component_weights={"b": 2.0})
    assert only.advantages[2:].tolist() == [0.0, 0.0]
    assert only.has_signal.tolist() == [True, True, False, False]


def test_groups_with_equal_rewards_have_a_signal_only_with_a_teacher():
    episodes = [judged("t", reward=1.0), judged("t", reward=0.0), judged("u", reward=1.0), judged("u", reward=1.0)]
    for teacher, expected in ((None, {"t"}), ("some/folder", {"t", "u"})):
        common = {"algorithm": {"adv_estimator": "dapo"}, "distillation": {"teacher": teacher}}
        config = AstunerConfig.model_validate({"trainer_common": common})
        algorithm = resolve(config.trainer_common.algorithm)
        assert tasks_with_signal(config, algorithm, episodes) == expected
        trained = step_advantages(config, algorithm, episodes, None).has_signal.tolist()
        assert trained == [True, True, teacher is not None, teacher is not None]


def test_components_with_equal_sums_have_a_signal():
    episodes = [judged("t", 1, 0), judged("t", 0, 1), judged("u", 1, 1), judged("u", 1, 1)]
    result = gdpo(episodes, component_weights={"a": 2.0, "b": 1.0})
    assert result.has_signal.tolist() == [True, True, False, False]
    assert result.advantages.tolist() == pytest.approx([1.22474, -1.22474, 0, 0], abs=1e-5)
    assert result.advantages[2:].tolist() == [0.0, 0.0]


def test_an_episode_without_a_judgement_has_its_reward_as_each_component():
    with_madness = [judged("t", 1, 0), judged("t", 0, 1), judged("t", reward=-1.0)]
    both = gdpo(with_madness, norm_adv_by_std=False).advantages
    assert both.tolist() == pytest.approx([1.0, 1.0, -2.0])
    alone = [judged("t", reward=1.0), judged("t", reward=0.0)]
    assert gdpo(alone).advantages.tolist() == pytest.approx([0.70711, -0.70711], abs=1e-5)


def test_a_component_that_a_gate_leaves_out_is_no_zero():
    episodes = [judged("t", 1, 5), judged("t", 1, 3), judged("t", 0)]
    # `a` differs from its mean 2/3 by 1/3, 1/3 and -2/3; `b` from its mean 4 by 1 and -1.
    result = gdpo(episodes, norm_adv_by_std=False).advantages
    assert result.tolist() == pytest.approx([4 / 3, -2 / 3, -2 / 3])


def test_an_unknown_component_is_an_error():
    with pytest.raises(BackboneError, match=r"component_weights names c, which no episode .* returned are: a, b"):
        gdpo([judged("t", 1, 2), judged("t", 0, 0)], component_weights={"a": 1, "c": 1})


def test_without_weights_and_undotted_names_the_reward_is_the_only_component():
    episodes = [judged("t", reward=1.0, a_x=3.0), judged("t", reward=0.0, a_x=5.0)]
    result = gdpo(episodes)
    assert result.has_signal.tolist() == [True, True]
    assert result.advantages.tolist() == pytest.approx([0.70711, -0.70711], abs=1e-5)
    weighted = gdpo(episodes, component_weights={"a.x": 1.0})
    assert weighted.advantages.tolist() == pytest.approx([-0.70711, 0.70711], abs=1e-5)


@pytest.mark.parametrize("masks", [False, True])
def test_episodes_with_a_truncated_answer_are_left_out_but_compared(masks: bool):
    calls = [replace(call(f"c{index}"), finish_reason="length" if index == 1 else "stop") for index in range(3)]
    episodes = [
        replace(episode(reward, made), episode_id=f"e{index}", samples=tuple(build_samples((made,))))
        for index, (reward, made) in enumerate(zip((1.0, 0.0, 0.0), calls, strict=True))
    ]
    config = AstunerConfig.model_validate(
        {"trainer_common": {"algorithm": {"adv_estimator": "dr_grpo", "mask_truncated_answers": masks}}}
    )
    result = step_advantages(config, resolve(config.trainer_common.algorithm), episodes, None)
    assert result.advantages.tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    rows = [TrainingRow.from_sample(e.samples[0], index) for index, e in enumerate(episodes)]
    trained = result.assign_to(rows)
    assert [row.episode for row in trained] == ([0, 2] if masks else [0, 1, 2])
    metrics = result.update_result({}, trained).metrics
    assert metrics.get("update/truncated_episodes") == (1.0 if masks else None)


def test_the_baseline_of_opo_is_weighted_by_the_trained_tokens():
    long = replace(call("c0"), completion_ids=(2, 3, 4), logprobs=(-1.0, -1.0, -1.0))
    episodes = [
        replace(episode(reward, made), samples=tuple(build_samples((made,))))
        for reward, made in ((1.0, long), (0.0, call("c1")))
    ]
    config = AstunerConfig.model_validate({"trainer_common": {"algorithm": {"adv_estimator": "opo"}}})
    result = step_advantages(config, resolve(config.trainer_common.algorithm), episodes, None)
    assert result.advantages.tolist() == pytest.approx([0.25, -0.75])
