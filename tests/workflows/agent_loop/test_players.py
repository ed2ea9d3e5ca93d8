"""The players of an environment's seats that are programs, in games of TextArena."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from astuner.config.consistency import inconsistencies
from astuner.config.root import RunConfig
from astuner.env_service import Environment, load_environment
from astuner.errors import PluginError
from astuner.model_tuner.targets import FrozenModel, Targets
from astuner.schema import Action, Observation
from astuner.workflows.agent_loop.players import RandomPlayer, ScriptedPlayer, load_player
from astuner.workflows.agent_loop.workflow import LoopSettings
from tests.workflows.agent_loop.conftest import Corridor, Play


class Folder(ScriptedPlayer):
    """Checks if it can, and otherwise folds."""

    async def act(self, observation: Observation) -> Action:
        return "[check]" if "[check]" in observation.legal_actions else "[fold]"


class Babbler(ScriptedPlayer):
    async def act(self, observation: Observation) -> Action:
        return "nonsense"


def kuhn_poker() -> Environment:
    return load_environment("textarena/KuhnPoker-v0", {"max_rounds": 1})


def test_a_program_plays_a_seat_and_the_model_another(play: Play) -> None:
    settings = LoopSettings(players={"player_1": Folder})
    episode = play(kuhn_poker(), ["[bet]"], settings=settings)
    assert (episode.status, episode.reward, episode.is_success) == ("ok", 1.0, True)
    assert episode.agent_rewards == {"player_0": 1.0}
    assert [(call.agent_name, call.target_tag, call.trained) for call in episode.calls] == [
        ("player_0", "player_0", True)
    ]
    assert "[Player 1] [check]" in episode.calls[0].messages[0]["content"]
    assert episode.metadata["scores"] == {"player_0": 1.0, "player_1": -1.0}


def test_self_play_trains_all_seats_or_one(play: Play) -> None:
    both = play(kuhn_poker(), ["[bet]", "[fold]"])
    assert both.agent_rewards == {"player_0": -1.0, "player_1": 1.0}
    assert {call.agent_name for call in both.calls if call.trained} == {"player_0", "player_1"}
    assert len(both.samples) == 2
    policy = Targets(trainable=("player_1",), frozen={"player_0": FrozenModel()})
    one = play(kuhn_poker(), ["[bet]", "[fold]"], targets=policy)
    assert one.agent_rewards == {"player_1": 1.0}
    assert {call.agent_name for call in one.calls if call.trained} == {"player_1"}
    assert len(one.samples) == 1


def test_a_game_that_ends_before_the_turn_of_the_model_has_its_reward(play: Play) -> None:
    episode = play(kuhn_poker(), [], settings=LoopSettings(players={"player_1": Babbler}))
    assert (episode.status, episode.agent_rewards, episode.calls) == ("dropped", {"player_0": 1.0}, ())


def test_a_game_without_the_model_fails(play: Play) -> None:
    players = {"player_0": RandomPlayer, "player_1": RandomPlayer}
    episode = play(kuhn_poker(), [], settings=LoopSettings(players=players))
    assert (episode.status, episode.error_kind) == ("failed", "workflow")
    assert "rollout.players names a program for every seat" in str(episode.error)


def test_random_needs_legal_actions(play: Play) -> None:
    episode = play(Corridor(), [], settings=LoopSettings(players={"": RandomPlayer}))
    assert (episode.status, episode.error_kind) == ("failed", "workflow")
    assert "does not list the legal actions" in str(episode.error)


def test_random_is_uniform_and_repeats_itself_with_the_seed() -> None:
    observation = Observation("", "player_0", ("[a]", "[b]", "[c]"))

    def actions(seed: int) -> list[Action]:
        player = RandomPlayer("player_0", seed)
        return [asyncio.run(player.act(observation)) for _ in range(20)]

    assert actions(1) == actions(1)
    assert actions(1) != actions(2)
    counts = Counter(action for seed in range(60) for action in actions(seed))
    assert all(330 < count < 470 for count in counts.values())
    other = [asyncio.run(RandomPlayer("player_1", 1).act(observation)) for _ in range(20)]
    assert other != actions(1)


def test_players_are_loaded_by_name(tmp_path: Path) -> None:
    assert load_player("random") is RandomPlayer
    assert load_player("tests.workflows.agent_loop.test_players->Folder") is Folder
    for path, message in (
        (
            "tests.workflows.agent_loop.test_players->kuhn_poker",
            "expected a class that derives from astuner.workflows.agent_loop.players",
        ),
        ("tests.workflows.agent_loop.test_players->Corridor", "expected one that derives from"),
        ("rnadom", "rnadom"),
    ):
        with pytest.raises(PluginError, match=message):
            load_player(path, search=[tmp_path])


@pytest.mark.parametrize(
    "other",
    [{"trainable_targets": ["player_1"]}, {"trainable_targets": ["player_0"], "frozen_models": {"player_1": {}}}],
)
def test_a_seat_has_one_player(other: dict) -> None:
    rollout = {"use_agentscope_protocol": False, "players": {"player_1": "random"}, **other}
    config = RunConfig.model_validate({"astuner": {"rollout": rollout, "task_reader": {"type": "env_service"}}})
    assert any("rollout.players has a program for 'player_1'" in problem.text for problem in inconsistencies(config))
