"""The tiny FrozenLake player: its transcripts have the form of the agent loop's prompts, and best moves are best."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gymnasium")

from astuner.agent_loop.histories import Turn, make_history
from astuner.config.loading import load_config
from astuner.env_service import load_environment
from tutorial.example_frozenlake.prepare_model import MAX_MOVES, MOVES, RECIPE, best_moves, transcript
from tutorial.starting_model import build_tokenizer

CONFIG = Path(__file__).parents[2] / "tutorial/example_frozenlake/frozenlake_tiny.yaml"


def test_best_moves_are_those_of_the_shortest_solution() -> None:
    environment = load_environment("gymnasium/FrozenLake-v1", {"train_tasks": 20})
    for task_id in environment.task_ids("train"):
        observation = environment.reset("train", task_id, 0)
        reference = environment.reference("train", task_id)
        assert reference is not None
        for number in range(len(reference.actions)):
            moves = best_moves(observation.text)
            assert moves
            result = environment.step(moves[-1])
            observation = result.observation
            assert result.is_done == (number == len(reference.actions) - 1)
        assert environment.evaluate().score == 1.0
    assert best_moves("PF\nFG") == ["down", "right"]
    assert best_moves("PF\nHG\nYou stay.") == ["right"]


async def test_a_transcript_has_the_prompts_of_the_agent_loop() -> None:
    environment = load_environment("gymnasium/FrozenLake-v1", {"train_tasks": 5})
    messages = transcript(environment, "3", random.Random(0))["messages"]
    answers = [message["content"] for message in messages[1::2]]
    assert 1 <= len(answers) <= MAX_MOVES
    assert set(answers) <= set(MOVES)
    config = load_config(CONFIG).config.astuner
    assert config.rollout.multi_turn.max_steps == MAX_MOVES
    model: Any = None  # a linear history asks the model nothing
    profile = environment.profile("train", "3")
    history = make_history(config.context_tracker, model, None, profile.init_messages, profile.main_query)
    observations = [environment.reset("train", "3", 0).text, *(environment.step(a).observation.text for a in answers)]
    history.turns = [
        Turn(text, {"role": "assistant", "content": answer})
        for text, answer in zip(observations[:-2], answers[:-1], strict=True)
    ]
    assert (await history.request(observations[-2])).messages == messages[:-1]


def test_each_cell_of_a_map_is_a_token() -> None:
    environment = load_environment("gymnasium/FrozenLake-v1", {"train_tasks": 20})
    rows = [transcript(environment, str(number), random.Random(number)) for number in range(20)]
    tokenizer = build_tokenizer(RECIPE, rows)
    assert tokenizer.tokenize("PFFH\nGS") == [*"PFFH", tokenizer.tokenize("\n")[0], *"GS"]
    assert all(len(tokenizer.tokenize(move)) == 1 for move in MOVES)
    text = tokenizer.apply_chat_template(rows[0]["messages"], tokenize=False)
    assert tokenizer.decode(tokenizer.encode(text)) == text
