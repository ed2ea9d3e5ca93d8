"""The adapter of TextArena, with the real package."""

from __future__ import annotations

import json
import random

import nltk
import numpy as np
import pytest
import textarena
from click.testing import CliRunner
from textarena.envs.registration import ENV_REGISTRY

from astuner.cli.main import astuner
from astuner.env_service import load_environment
from astuner.env_service.adapters import textarena as adapter
from astuner.env_service.adapters.textarena_faults import require_data
from astuner.errors import EnvError


def play(environment, seed, *, steps=30):
    """Play with seeded actions, legal ones if they are listed; return the observations and the results."""
    rng = random.Random(seed)
    observation, results = environment.reset("train", "0", seed), []
    first = observation
    while len(results) < steps and not (results and results[-1].is_done):
        results.append(environment.step(rng.choice(observation.legal_actions or ("[1]", "[a b]", "hello"))))
        observation = results[-1].observation
    return first, results


def one_id_per_game():
    """Return the first playable id of each game. Sokoban's generator takes long for some seeds of the larger rooms."""
    first = {}
    for name in adapter.names():
        first.setdefault(ENV_REGISTRY[name].entry_point, name)
    return list(first.values())


def test_every_listed_game_plays_and_repeats_itself():
    names = one_id_per_game()
    assert len(names) > 60
    for name in names:
        environment = load_environment(f"textarena/{name}")
        profile = environment.profile("train", "0")
        assert profile.main_query
        first, results = play(environment, 3)
        assert (first, results) == play(load_environment(f"textarena/{name}"), 3), name
        players = profile.metadata["num_players"]
        seats = {adapter.seat(player) for player in range(players)}
        for observation in (first, *(result.observation for result in results)):
            assert observation.agent in (seats if players > 1 else {""}), name
        for result in results:
            assert set(result.reward) == seats if players > 1 else isinstance(result.reward, float), name
        score = environment.evaluate().score
        assert (set(score) if players > 1 else score <= 1.0) == (seats if players > 1 else True), name


def test_games_that_cannot_be_played_are_named_with_a_reason():
    faults = adapter.faults()
    assert set(faults).isdisjoint(adapter.names())
    listed = {name for name in ENV_REGISTRY if not name.endswith(("-train", "-raw"))}
    assert listed == {*faults, *adapter.names()}
    first = {ENV_REGISTRY[name].entry_point: name for name in faults}
    for name in first.values():
        with pytest.raises(EnvError) as raised:
            load_environment(f"textarena/{name}")
        assert faults[name] in str(raised.value)


def test_no_game_is_refused_without_need(monkeypatch):
    """A game that is not listed fails in TextArena itself."""
    monkeypatch.setattr(nltk, "download", require_data)
    for name in {ENV_REGISTRY[name].entry_point: name for name in adapter.faults()}.values():
        with pytest.raises(Exception):  # noqa: B017, PT011 - errors of many types
            start_in_textarena(name)


def start_in_textarena(name):
    """Start a game without the adapter, and make one move."""
    error = None
    for players in (1, 2, 3, 6):
        game = textarena.make(name)
        try:
            game.reset(num_players=players, seed=0)
        except Exception as rejection:  # errors of many types
            error = rejection
            continue
        return game.step("[1] hello")
    raise error


def test_data_of_nltk_is_never_downloaded(monkeypatch):
    asked = []
    monkeypatch.setattr(nltk, "download", lambda *data, **_: asked.append(data))
    adapter.faults.cache_clear()
    with pytest.raises(EnvError, match=r"Wordle-v0 cannot be played.*python -m nltk.downloader"):
        load_environment("textarena/Wordle-v0")
    environment = load_environment("textarena/KuhnPoker-v0")
    with environment._isolated(), pytest.raises(EnvError, match="astuner downloads nothing"):
        nltk.download("words")
    assert asked == []


@pytest.mark.parametrize("name", ["Mastermind-v0", "Mastermind-v0-extreme", "GuessTheNumber-v0", "TowerOfHanoi-v0"])
def test_the_reference_solves_the_task(name):
    environment = load_environment(f"textarena/{name}")
    for task_id in environment.task_ids("validation")[:3]:
        reference = environment.profile("validation", task_id).reference
        environment.reset("validation", task_id, 0)
        results = [environment.step(action) for action in reference.actions]
        assert results[-1].is_done
        assert environment.evaluate().score == reference.score
        assert environment.evaluate().is_success


def test_an_invalid_action_is_handled_by_the_rules_of_the_game():
    environment = load_environment("textarena/KuhnPoker-v0")
    first = environment.reset("train", "0", 0)
    assert first.agent == "player_1"
    assert first.legal_actions == ("[check]", "[bet]")
    refused = environment.step("fold")  # there is no bet yet
    assert not refused.is_valid
    assert not refused.is_done
    assert refused.observation.agent == first.agent
    assert refused.observation.legal_actions == first.legal_actions
    assert "invalid move" in refused.observation.text
    lost = environment.step("nonsense")
    assert lost.is_done
    assert lost.reward == {"player_0": 1.0, "player_1": -1.0}
    with pytest.raises(EnvError, match="has ended"):
        environment.step("[check]")


def test_each_seat_sees_its_own_prompt_and_card_once():
    environment = load_environment("textarena/KuhnPoker-v0", {"max_rounds": 1})
    texts = {"player_0": "", "player_1": ""}
    observation = environment.reset("train", "4", 0)
    for action in ("check", "[bet]"):
        texts[observation.agent] += observation.text
        observation = environment.step(action).observation
    texts[observation.agent] += observation.text
    for player in (0, 1):
        assert texts[f"player_{player}"].count(f"You are Player {player} in a 1 round game") == 1
        assert texts[f"player_{player}"].count("Your card is") == (1 if player == 1 else 2)  # the game says it twice
        assert f"You are Player {1 - player}" not in texts[f"player_{player}"]
    assert observation.legal_actions == ("[fold]", "[call]") or set(observation.legal_actions) == {"[fold]", "[call]"}
    assert "[Player 1] [check]" not in texts["player_1"]  # its own action is in its history


def test_a_game_for_many_players_names_its_seats():
    environment = load_environment("textarena/SecretMafia-v0", {"num_players": 7})
    environment.reset("train", "0", 0)
    agents = set()
    for _ in range(60):
        result = environment.step(environment._legal[0] if environment._legal else "I am a villager.")
        agents.add(result.observation.agent)
        if result.is_done:
            break
    assert len(agents) >= 3
    assert set(environment.evaluate().score) == {f"player_{number}" for number in range(7)}
    assert environment.profile("train", "0").metadata == {"num_players": 7}


def test_the_splits_and_other_seeds_have_other_tasks():
    def codes(split, **params):
        environment = load_environment("textarena/Mastermind-v0-extreme", {"validation_tasks": 20, **params})
        return {environment.profile(split, task_id).reference for task_id in environment.task_ids(split)[:20]}

    train, validation, other = codes("train"), codes("validation"), codes("train", seed=1)
    assert len(train) == len(validation) == len(other) == 20
    assert train.isdisjoint(validation)
    assert train.isdisjoint(other)


def test_the_later_randomness_follows_the_seed_of_reset():
    def rolls(task_id, seed):
        environment = load_environment("textarena/PigDice-v0")
        environment.reset("train", task_id, seed)
        return [environment.step("[roll]").observation.text for _ in range(6)]

    assert rolls("0", 1) == rolls("0", 1)
    assert rolls("0", 1) != rolls("0", 2)


def test_a_game_leaves_the_random_numbers_and_the_output_of_its_process_alone(capsys):
    random.seed(5), np.random.seed(5)
    expected = [random.random(), np.random.rand()]
    random.seed(5), np.random.seed(5)
    play(load_environment("textarena/Sokoban-v0"), 0, steps=3)
    play(load_environment("textarena/RushHour-v0"), 0, steps=3)  # prints how it generated the puzzle
    assert [random.random(), np.random.rand()] == expected
    assert capsys.readouterr().out == ""


def test_two_games_in_one_process_do_not_share_random_numbers():
    alone = play(load_environment("textarena/PigDice-v0"), 7)[1]
    environment, other = load_environment("textarena/PigDice-v0"), load_environment("textarena/PigDice-v0")
    rng = random.Random(7)
    observation, results = environment.reset("train", "0", 7), []
    other.reset("train", "1", 0)
    while len(results) < len(alone):
        results.append(environment.step(rng.choice(observation.legal_actions)))
        observation = results[-1].observation
        other.step("[roll]")
    assert results == alone


def test_the_game_ends_when_all_players_are_eliminated():
    environment = load_environment("textarena/PublicGoodsGame-v0")
    _, results = play(environment, 0, steps=500)  # textarena 0.7.4 would search for a next player without end
    assert results[-1].is_done
    assert results[-1].reward == {"player_0": 0.0, "player_1": 0.0}
    assert environment.evaluate().details["player_0"]["reason"] == "All players were eliminated."


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("KuhnPokr-v0", {}, "no game 'KuhnPokr-v0'"),
        ("KuhnPoker-v0", {"num_players": 3}, "could not be started"),
        ("KuhnPoker-v0", {"num_players": 0}, "num_players of textarena/KuhnPoker-v0 is 0; expected an integer from 1"),
        ("KuhnPoker-v0", {"train_tasks": "many"}, "train_tasks of textarena/KuhnPoker-v0 is 'many'"),
        ("KuhnPoker-v0", {"rounds": 3}, "unexpected keyword argument 'rounds'"),
    ],
)
def test_bad_parameters_are_errors(name, params, message):
    with pytest.raises(EnvError, match=message):
        load_environment(f"textarena/{name}", params).reset("train", "0", 0)


def test_unknown_tasks_are_errors():
    environment = load_environment("textarena/KuhnPoker-v0", {"train_tasks": 2})
    assert environment.task_ids("train") == ["0", "1"]
    for split, task_id in (("train", "2"), ("train", "x"), ("test", "0")):
        with pytest.raises(EnvError):
            environment.reset(split, task_id, 0)


def test_env_list_names_the_unusable_games():
    printed = CliRunner().invoke(astuner, ["env", "list", "--family", "textarena"]).output
    assert "  textarena/SecretMafia-v0\n" in printed
    assert "  textarena/UsedCar-v0-balanced cannot be used: textarena 0.7.4 has no module" in printed
    row = json.loads(CliRunner().invoke(astuner, ["env", "list", "--family", "textarena", "--json"]).output)
    assert row["unusable"] == {f"textarena/{name}": fault for name, fault in adapter.faults().items()}
