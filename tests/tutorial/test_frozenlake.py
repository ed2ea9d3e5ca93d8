"""The tiny FrozenLake player: its transcripts have the form of the agent loop's prompts, and best moves are best."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("gymnasium")

from astuner.config.loading import load_config
from astuner.config.workflow import ContextTrackerConfig
from astuner.env_service import load_environment
from astuner.schema import LlmCall
from astuner.workflows.agent_loop.histories import Turn, make_history
from tutorial.example_frozenlake.prepare_model import MAX_MOVES, MOVES, RECIPE, best_moves, board, transcript
from tutorial.example_frozenlake.prepare_model_8x8 import (
    SUMMARY_PROMPT,
    Move,
    after_summary,
    game,
    linear,
    linear_think,
    sliding_window,
    summary,
    summary_of,
    transcripts,
)
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


class ThinkingModel:
    """Answers with the turns of a game, and keeps the requests."""

    def __init__(self, moves: list[Move]) -> None:
        self.moves, self.requests = list(moves), []

    async def chat(self, messages: Any, **options: Any) -> Any:
        self.requests.append([dict(message) for message in messages])
        is_summary = messages[-1]["content"].endswith(SUMMARY_PROMPT)
        text = summary_of(self.moves[: len(messages) // 2])["content"]
        return SimpleNamespace(call=object(), parsed=SimpleNamespace(content=text)) if is_summary else None


async def requests_of(kind: str, moves: list[Move], instruction: str, max_tokens: int = 10**9) -> list[list[dict]]:
    """Return the messages that a history manager gives to the model in a game, also the requests for summaries."""
    model: Any = ThinkingModel(moves)
    model.tuner = SimpleNamespace(count_prompt_tokens=lambda messages, tools: len(messages))
    config = ContextTrackerConfig.model_validate({"context_tracker_type": kind, "max_env_len": max_tokens})
    history = make_history(config, model, None, (), instruction)
    requests = []
    for move in moves:
        history.last_call = cast("LlmCall", object())
        request = await history.request(move.observation)
        requests.append([dict(message) for message in request.messages])
        history.turns.append(Turn(move.observation, move.answer()))
    return [*requests, *model.requests]


@pytest.mark.parametrize("form", [linear, sliding_window, linear_think, summary, after_summary])
async def test_the_transcripts_of_the_8x8_player_have_the_form_of_each_history(form: Any) -> None:
    environment = load_environment("gymnasium/FrozenLake8x8-v1", {"train_tasks": 5})
    for number in range(5):
        rng = random.Random(number)
        moves = game(environment, str(number), rng)
        instruction = environment.profile("train", str(number)).main_query
        messages = form(instruction, moves, rng)
        assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2)
        kind = "auto_context" if form in (summary, after_summary) else form.__name__
        requests = []
        # The prompt is compressed when it has more messages than this.
        for limit in range(1, 2 * len(moves)) if kind == "auto_context" else (10**9,):
            requests += await requests_of(kind, moves, instruction, limit)
        prompts = [messages[:index] for index in range(1, len(messages), 2) if messages[index].get("weight", 1)]
        assert prompts or any(move.is_random for move in moves)
        # The first turns of a window also train short histories, which the manager does not send. How many turns follow
        # a summary depends on its limit.
        for prompt in {sliding_window: prompts[-1:], after_summary: [messages[:1]]}.get(form, prompts):
            plain = [{key: value for key, value in message.items() if key != "weight"} for message in prompt]
            seen = [[{k: v for k, v in message.items() if k != "weight"} for message in sent] for sent in requests]
            assert plain in seen


def test_the_8x8_player_learns_best_moves_and_the_cells_around_it() -> None:
    rows = transcripts(40)
    assert rows == transcripts(40)
    moves = [
        (messages[index - 1]["content"], message)
        for messages in (row["messages"] for row in rows)
        for index, message in enumerate(messages)
        if message["role"] == "assistant" and message.get("weight", 1) and "reasoning_content" in message
    ]
    assert len(moves) > 100
    for observation, answer in moves:
        assert answer["content"] == best_moves(observation)[0]
        cells, (row, column) = board(observation)
        down = cells.get((row + 1, column), "none")
        assert f"down {down}, right" in answer["reasoning_content"]
