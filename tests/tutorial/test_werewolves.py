"""The werewolves example: its rules, the side that is trained, and the transcripts of its starting model."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astuner.cli.main import astuner
from astuner.config.loading import load_config
from astuner.context_tracker.audit import certificate
from astuner.model_tuner.chat_options import CallSettings
from astuner.model_tuner.codec import ChatCodec
from astuner.model_tuner.targets import FrozenModel, Targets
from astuner.run_record import read_episode, read_index
from astuner.schema import Episode, SamplingParams, Task, WorkflowTask
from astuner.task_runner.runner import TaskRunner
from tests.scripted_engine import ScriptedEngine
from tutorial.example_werewolves import game, prepare_data, prepare_model
from tutorial.example_werewolves.game import SEER, VILLAGER, WEREWOLF, Ask, Result, Roles, Tell
from tutorial.example_werewolves.werewolves import Werewolves

CONFIG = Path(__file__).parents[2] / "tutorial/example_werewolves/werewolves_tiny.yaml"
ROLES = {"Player1": WEREWOLF, "Player2": SEER, "Player3": VILLAGER, "Player4": VILLAGER, "Player5": VILLAGER}


def play(roles: Roles, answer: Callable[[str, str], str]) -> tuple[Result, list[Tell]]:
    """Play a game with the answers of a function of the player and the message."""
    moderator, events, answers = game.play(roles), [], None
    while True:
        try:
            event = moderator.send(answers)
        except StopIteration as end:
            return end.value, events
        events.append(event)
        answers = {player: answer(player, event.text) for player in event.players} if isinstance(event, Ask) else None


def scripted(choices: Mapping[str, str], speech: str = "Hello.") -> Callable[[str, str], str]:
    """Return players who always choose the same player by the first word of the message: Night or Vote."""
    return lambda player, text: speech if text == game.SPEAK else choices.get(f"{player} {text.split()[0]}", "nobody")


def test_the_others_win_when_they_vote_for_the_werewolf() -> None:
    choices = {"Player1 Night": "Player3", "Player2 Night": "Player1", "Player2 Vote": "It is Player1."}
    result, events = play(ROLES, scripted(choices, "Hello \n all."))
    assert result == Result(werewolves_win=False, days=1)
    told = [(event.players, event.text) for event in events if not isinstance(event, Ask)]
    living = ("Player1", "Player2", "Player4", "Player5")
    votes = "Player1 for nobody, Player2 for Player1, Player4 for nobody, Player5 for nobody"
    assert told == [
        (("Player2",), "Player1 is a werewolf."),
        (living, "Day 1. Player3 was killed."),
        *((tuple(other for other in living if other != player), f"{player} says: Hello all.") for player in living),
        (living, f"Votes: {votes}. Player1 is out."),
    ]


def test_the_werewolves_win_when_they_are_half_of_the_players() -> None:
    choices = {"Player1 Night": "Player2", **{f"Player{n} Vote": "Player3" for n in (1, 4)}, "Player3 Vote": "Player1"}
    result, events = play(ROLES, scripted(choices))
    # Player2 is killed and Player3 is out. The second night names nobody, and the second day has no vote for Player1.
    assert result.werewolves_win
    assert [event.text for event in events if event.text.startswith("Night 2")] == [
        "Night 2. Whom do you kill? Answer with a name: Player4, Player5."
    ]
    assert events[-1].text.endswith("Nobody is out.")


def test_a_tie_and_answers_that_name_nobody_change_nothing() -> None:
    choices = {"Player2 Vote": "Player3", "Player3 Vote": "Player2", "Player4 Vote": "Player4"}
    result, events = play(ROLES, scripted(choices))
    assert result == Result(werewolves_win=True, days=len(ROLES))
    votes = [event.text for event in events if event.text.startswith("Votes")]
    assert all(vote.endswith("Player4 for nobody, Player5 for nobody. Nobody is out.") for vote in votes)


def test_two_werewolves_agree_on_a_victim() -> None:
    roles = {**ROLES, "Player6": WEREWOLF, "Player10": VILLAGER}
    _, events = play(roles, scripted({"Player1 Night": "Player10", "Player6 Night": "I agree."}))
    assert [event.text for event in events[:2]] == [
        "Night 1. Whom do you kill? Answer with a name: Player2, Player3, Player4, Player5, Player10.",
        "Night 1. Your partner chooses Player10. Whom do you kill? "
        "Answer with a name: Player2, Player3, Player4, Player5, Player10.",
    ]
    assert any(event.text == "Day 1. Player10 was killed." for event in events)
    assert game.instruction("Player6", roles).endswith(
        "You are Player6, a werewolf. The werewolves are Player1, Player6."
    )
    assert "The werewolves are" not in game.instruction("Player2", roles)


@given(st.integers(0, 10_000))
def test_every_game_of_scripted_players_has_the_winner_that_the_rules_name(seed: int) -> None:
    rng = random.Random(seed)
    roles = prepare_data.deal(rng)
    messages, result = prepare_model.conversations(roles, rng)
    (werewolf,) = (player for player, role in roles.items() if role == WEREWOLF)
    heard = [message["content"] for message in messages[werewolf] if message["role"] == "user"]
    assert 1 <= result.days <= len(roles)
    assert result.werewolves_win or heard[-1].startswith(game.VOTE)
    for player, own in messages.items():
        assert own[0]["content"] == game.instruction(player, roles)
        assert own[-1]["role"] == "assistant"
        learned = [message for message in own if re.fullmatch(r"Player\d is (not )?a werewolf\.", message["content"])]
        assert not learned or roles[player] == SEER


async def episode_of(tokenizer: Any, targets: Targets, answers: Sequence[str] = ()) -> Episode:
    """Run an episode in which the model answers with the first legal name, and says that it is a villager."""

    def complete(prompt: Sequence[int], params: SamplingParams) -> list[int]:
        request = tokenizer.decode(list(prompt)).rpartition("user\n")[2]
        names = request.partition("Answer with a name: ")[2].partition(".")[0].split(", ")
        text = names[0] if names[0] else "I am the seer. Player4 is a werewolf."
        ids: list[int] = tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False)
        return ids

    runner = TaskRunner(Werewolves, None, ScriptedEngine(complete, 4096), ChatCodec(tokenizer), targets=targets)
    task = WorkflowTask(Task("1", "Play.", metadata=prepare_data.make_task(ROLES)), "train-000001-1-0")
    return await runner.run(task, runner.tuner(task, CallSettings(max_model_len=4096, max_response_length=4096)))


@pytest.mark.parametrize(
    ("trainable", "frozen", "players"),
    [
        ((WEREWOLF,), (VILLAGER, SEER), {"Player1"}),
        ((VILLAGER, SEER), (WEREWOLF,), {"Player2", "Player3", "Player4", "Player5"}),
    ],
)
async def test_only_the_trained_side_has_rewards_and_samples(
    tokenizer: Any, trainable: tuple[str, ...], frozen: tuple[str, ...], players: set[str]
) -> None:
    episode = await episode_of(tokenizer, Targets(trainable, {role: FrozenModel() for role in frozen}))
    assert episode.status == "ok", episode.error
    # The werewolf kills the seer, who is asked before it dies. The others vote for the first player, the werewolf.
    assert {call.agent_name for call in episode.calls if call.trained} == players
    assert episode.agent_rewards == {player: float(WEREWOLF not in trainable) for player in players}
    assert episode.is_success == (WEREWOLF not in trainable)
    assert dict(episode.log_metrics) == {"werewolves_win": 0.0, "days": 1, "werewolf_claims_to_be_seer": 1.0}
    assert certificate(episode.calls, episode.samples) == 1.0
    # The history of a player only grows, so all calls of a player are one sample.
    assert len(episode.samples) == len(players)


async def test_the_transcripts_have_the_prompts_of_the_agents(tokenizer: Any) -> None:
    episode = await episode_of(tokenizer, Targets())
    assert episode.status == "ok", episode.error
    spoken = {player: [call for call in episode.calls if call.agent_name == player] for player in ROLES}
    answers = {player: iter([call.messages[-1]["content"] for call in calls]) for player, calls in spoken.items()}

    def repeat(messages: list[dict[str, Any]], player: str, roles: Roles, rng: random.Random) -> str:
        return next(answers[player])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_model, "answer", repeat)
        conversations, _ = prepare_model.conversations(ROLES, random.Random(0))
    for player, messages in conversations.items():
        sent = [{"role": m["role"], "content": m["content"]} for m in spoken[player][-1].messages]
        assert sent == messages


@pytest.mark.parametrize(
    ("speeches", "wins"),
    [(prepare_model.SPEECHES_OF_WEREWOLF, 0.56), ({"villager": 0.0, "suspicion": 0.0, "seer": 1.0}, 0.83)],
)
def test_a_werewolf_that_always_poses_as_the_seer_wins_more_often(
    monkeypatch: pytest.MonkeyPatch, speeches: dict[str, float], wins: float
) -> None:
    """The shares are stated in docs/en/example_werewolves.md."""
    monkeypatch.setattr(prepare_model, "SPEECHES_OF_WEREWOLF", speeches)
    rng = random.Random(0)
    games = [prepare_model.conversations(prepare_data.deal(rng), rng)[1] for _ in range(2_000)]
    assert sum(result.werewolves_win for result in games) / len(games) == pytest.approx(wins, abs=0.005)


def test_deals_are_seeded_and_the_splits_share_none() -> None:
    training, validation = prepare_data.deals()
    assert prepare_data.deals() == (training, validation)
    keys = [tuple(roles.items()) for roles in (*training, *validation)]
    assert len(set(keys)) == len(keys) == prepare_data.TRAINING_TASKS + prepare_data.VALIDATION_TASKS
    assert all(sorted(roles.values()) == sorted(prepare_data.DECK) for roles in training)


def test_the_configuration_trains_the_werewolf_against_the_starting_model() -> None:
    rollout = load_config(CONFIG).config.astuner.rollout
    assert rollout.trainable_targets == [WEREWOLF]
    assert {role: frozen.model for role, frozen in rollout.frozen_models.items()} == {
        VILLAGER: "starting_model",
        SEER: "starting_model",
    }
    # A game of six players has at most two answers a day of each, and those of the night.
    assert rollout.multi_turn.max_steps >= len(prepare_data.DECK) * (2 * len(prepare_data.DECK) + 2)


def test_a_run_with_a_random_model(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With three players, the game ends within 30 answers, also if they name nobody."""
    monkeypatch.chdir(CONFIG.parents[2])
    monkeypatch.setattr(prepare_data, "DECK", (WEREWOLF, SEER, VILLAGER))
    monkeypatch.setattr(prepare_data, "FOLDER", tmp_path / "data")
    monkeypatch.setattr(prepare_data, "TRAINING_TASKS", 4)
    model = tmp_path / "model"
    shutil.copytree(model_folder, model)
    config = json.loads((model / "config.json").read_text())
    # The agents' prompts need a longer context. Positions are rotary, so it needs no additional weights.
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    small = {
        "model.path": model,
        "data.train_batch_size": 1,
        "data.max_prompt_length": 1000,
        "data.max_response_length": 3000,
        "rollout.num_repeat": 2,
        "rollout.max_env_worker": 2,
        "rollout.max_model_len": 4000,
        "rollout.max_response_length_in_one_turn": 2,
        "task_reader.dataset_file.validation.file_path": "''",
        "trainer_common.total_training_steps": 1,
    }
    overrides = [f"astuner.{key}={value}" for key, value in small.items()]
    records = tmp_path / "records"
    astuner.main(["--conf", str(CONFIG), "--exp-dir", str(records), *overrides], standalone_mode=False)
    (record,) = [folder for folder in records.iterdir() if folder.is_dir()]
    episodes = [read_episode(record / entry.path) for entry in read_index(record)]
    assert [episode.error for episode in episodes] == [None, None]
    for episode in episodes:
        assert len(episode.calls) <= 30
        assert {call.target_tag for call in episode.calls if call.trained} == {WEREWOLF}
        assert {call.target_tag for call in episode.calls} > {WEREWOLF}
