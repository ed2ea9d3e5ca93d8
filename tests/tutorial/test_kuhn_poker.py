"""Kuhn poker: its payoffs, the exploitability of policies, and the measurement of a model."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astuner.workflows.agent_loop.workflow import LoopSettings
from tests.examples import examples
from tests.workflows.agent_loop.conftest import Play, play  # noqa: F401 - a fixture
from tutorial.example_kuhn_poker import measure
from tutorial.example_kuhn_poker.kuhn_poker import (
    CARDS,
    FIRST,
    SECOND,
    Cautious,
    KuhnPoker,
    Policy,
    actions,
    answer_with,
    best_response_value,
    card_of,
    cautious,
    equilibrium,
    exploitability,
    information_sets,
    instruction_of,
    next_history,
    observations,
    payoff,
    uniform,
    value,
)

policies = st.fixed_dictionaries({info: st.floats(0, 1) for info in information_sets()})


@given(st.floats(0, 1 / 3))
def test_an_equilibrium_has_the_value_of_the_game_and_is_not_exploitable(alpha: float) -> None:
    policy = equilibrium(alpha)
    assert value(policy, policy) == pytest.approx(-1 / 18)
    assert exploitability(policy) == pytest.approx(0, abs=1e-12)


def test_the_uniform_policy_has_its_known_exploitability() -> None:
    assert exploitability(uniform()) == pytest.approx(11 / 24)  # OpenSpiel computes the same
    assert best_response_value(uniform(), as_first=True) == pytest.approx(0.5)
    assert value(uniform(), uniform()) == pytest.approx(1 / 8)


@settings(max_examples=examples(25))
@given(policies, policies)
def test_no_policy_wins_more_than_the_best_response(policy: Policy, other: Policy) -> None:
    assert value(other, policy) <= best_response_value(policy, as_first=True) + 1e-12
    assert -value(policy, other) <= best_response_value(policy, as_first=False) + 1e-12
    assert exploitability(policy) >= -1e-12
    # An equilibrium loses at most the value of the game.
    assert value(equilibrium(0.2), other) >= -1 / 18 - 1e-12
    assert value(other, equilibrium(0.2)) <= -1 / 18 + 1e-12


def test_the_environment_has_the_payoffs_of_the_tree() -> None:
    environment = KuhnPoker(train_tasks=60)
    seen: Counter[tuple[str, str, str]] = Counter()
    for task_id in environment.task_ids("train"):
        for choices in itertools.product((0, 1), repeat=3):
            observation, history, is_done = environment.reset("train", task_id, 0), "", False
            cards: dict[str, str] = {}
            for choice in choices:
                if is_done:
                    break
                cards.setdefault(observation.agent, card_of(observation.text))
                action = observation.legal_actions[actions(observation).index(choice)]
                history = next_history(history, choice)
                result = environment.step(action)
                observation, is_done = result.observation, result.is_done
            chips = payoff((cards[FIRST], cards[SECOND]), history)
            assert is_done
            assert chips is not None
            assert result.reward == environment.evaluate().score == {FIRST: chips, SECOND: -chips}
            seen[cards[FIRST], cards[SECOND], history] += 1
    assert len(seen) == 6 * 5


def test_a_player_who_breaks_the_rules_loses_one_chip() -> None:
    environment = KuhnPoker()
    environment.reset("train", "0", 0)
    assert environment.step("[call]").reward == {FIRST: 0, SECOND: 0}
    result = environment.step("[call]")
    assert (result.is_done, result.reward) == (True, {FIRST: -1, SECOND: 1})


def test_the_observations_of_all_information_sets() -> None:
    environment = KuhnPoker()
    found = observations(environment.task_ids("train"), environment)
    assert set(found) == set(information_sets())
    for (card, history), seen in found.items():
        assert card_of(seen[0].text) == card
        assert seen[-1].agent == (FIRST if history in ("", "cb") else SECOND)
        assert seen[-1].legal_actions == (("[fold]", "[call]") if history.endswith("b") else ("[check]", "[bet]"))
        assert len(seen) == (2 if history == "cb" else 1)


async def test_the_scripted_opponent_plays_its_policy() -> None:
    environment = KuhnPoker()
    for (card, history), seen in observations(environment.task_ids("train"), environment).items():
        player = Cautious(seen[0].agent, 0)
        for observation in seen:
            action = await player.act(observation)
        chosen = actions(seen[-1])[seen[-1].legal_actions.index(action)]
        assert chosen == cautious()[card, history]


def test_the_policy_of_a_model_is_read_from_the_prompts_of_the_agent_loop(
    play: Play,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tokenizer: Any,
) -> None:
    """The messages that are measured are those that the loop sends in self-play."""
    card = card_of(KuhnPoker().reset("train", "0", 0).text)
    answers = [answer_with(card, action) for action in ("[check]", "[bet]", "[fold]")]
    episode = play(KuhnPoker(), answers, settings=LoopSettings("box"))
    assert episode.agent_rewards == {FIRST: -1.0, SECOND: 1.0}
    environment = KuhnPoker()
    instruction = instruction_of(environment)
    found = observations(environment.task_ids("train"), environment)
    sent = [
        [{"role": message["role"], "content": message["content"]} for message in call.messages[:-1]]
        for call in episode.calls
        if call.agent_name == FIRST
    ]
    for history, messages in zip(("", "cb"), sent, strict=True):
        assert measure._conversation(instruction, found[card, history], (card, history)) == messages


def test_the_measurements_of_a_model(model_folder: Any) -> None:
    measured = measure.measurements(model_folder)
    assert set(measured["bet_or_call"]) == {card + history for card in CARDS for history in ("", "cb", "c", "b")}
    assert 0 <= measured["exploitability"] <= 2
    assert 0.9 < measured["other"] <= 1  # the model of the tests has random weights
