"""Create a player of FrozenLake 8 x 8 that thinks before each move, for all history managers of the agent loop.

The model has about 0.2 M parameters. It is trained on seeded transcripts only. The player names the cells around it
and then moves along a shortest path. Some of the moves in the transcripts are random, so that the player learns to go
on from any cell; they are context and are not trained. Each transcript has the form that one of the history managers
gives to a game. The maps belong to the training split.

    python -m tutorial.example_frozenlake.prepare_model_8x8
"""

import random
from dataclasses import dataclass, replace
from pathlib import Path

from astuner.config.workflow import ContextTrackerConfig
from astuner.env_service import Environment, load_environment
from tutorial.example_frozenlake import prepare_model
from tutorial.example_frozenlake.prepare_model import MOVES, best_moves, board
from tutorial.starting_model import starting_model

RECIPE = replace(
    prepare_model.RECIPE,
    name="frozenlake_8x8",
    renderer="default",
    keep_thinking=True,
    context=4096,
    batch=16,
)
RANDOM_MOVES = 0.15
MAX_MOVES = 24
WINDOW = ContextTrackerConfig().sliding_window_cm.turns
SUMMARY_PROMPT = ContextTrackerConfig().auto_context_cm.prompt
SUMMARY_HEADING = "Summary of the steps so far:"


@dataclass(frozen=True)
class Move:
    """A turn of a game: an observation, the thinking about it, and the move."""

    observation: str
    thinking: str
    move: str
    is_random: bool

    def answer(self, *, with_thinking: bool = True, is_context: bool = False) -> dict:
        """Return the assistant message of a move. Context messages and random moves are not trained."""
        message = {"role": "assistant", "content": self.move}
        if with_thinking:
            message["reasoning_content"] = self.thinking
        return {**message, "weight": 0} if is_context or self.is_random else message


def tiny_model() -> Path:
    """Return the folder of the model. Create the model if it does not exist."""
    return starting_model(RECIPE, transcripts, [Path(__file__), Path(prepare_model.__file__)])


def transcripts(count: int = 4_000) -> list[dict]:
    """Return the transcripts of some games, by default those of the training."""
    rng = random.Random(RECIPE.seed)
    environment = load_environment("gymnasium/FrozenLake8x8-v1", {"train_tasks": 4000, "seed": 1})
    ids = list(environment.task_ids("train"))
    forms = [linear, sliding_window, linear_think, summary, after_summary]
    rows = []
    while len(rows) < count:
        task_id = ids[len(rows) % len(ids)]
        moves = game(environment, task_id, rng)
        instruction = environment.profile("train", task_id).main_query
        (form,) = rng.choices(forms, [30, 40, 15, 5, 10]) if len(moves) > 1 else [linear]
        messages = form(instruction, moves, rng)
        if any(message["role"] == "assistant" and message.get("weight", 1) for message in messages):
            rows.append({"messages": messages})
    return rows


def game(environment: Environment, task_id: str, rng: random.Random) -> list[Move]:
    """Return a game with random moves."""
    observation, moves = environment.reset("train", task_id, 0).text, []
    for _ in range(MAX_MOVES):
        best = best_moves(observation)[0]
        move = rng.choice(list(MOVES)) if rng.random() < RANDOM_MOVES else best
        moves.append(Move(observation, thinking(observation), move, is_random=move != best))
        result = environment.step(move)
        if result.is_done:
            break
        observation = result.observation.text
    return moves


def thinking(observation: str) -> str:
    """Return the cells around the player, in words."""
    cells, (row, column) = board(observation)
    around = {move: cells.get((row + down, column + right), "none") for move, (down, right) in MOVES.items()}
    return ", ".join(f"{move} {cell}" for move, cell in around.items())


def linear(instruction: str, moves: list[Move], rng: random.Random) -> list[dict]:
    """Return the conversation of a game."""
    return _conversation(instruction, moves)


def sliding_window(instruction: str, moves: list[Move], rng: random.Random) -> list[dict]:
    """Return the last turns up to a move."""
    end = rng.randint(1, len(moves))
    return _conversation(instruction, moves[max(0, end - WINDOW - 1) : end])


def linear_think(instruction: str, moves: list[Move], rng: random.Random) -> list[dict]:
    """Return the turns up to a move, of which only the last one has thinking and is trained."""
    *earlier, last = moves[: rng.randint(1, len(moves))]
    messages = _conversation(instruction, [*earlier, last])
    answers = [*(move.answer(with_thinking=False, is_context=True) for move in earlier), last.answer()]
    messages[1::2] = answers
    return messages


def summary(instruction: str, moves: list[Move], rng: random.Random) -> list[dict]:
    """Return the turns up to the request for a summary. Only the summary is trained."""
    moves = moves[: rng.randint(2, len(moves))]
    messages = _conversation(instruction, moves)
    messages[1::2] = [*(move.answer(is_context=True) for move in moves[:-1]), summary_of(moves[:-1])]
    messages[-2]["content"] += f"\n\n{SUMMARY_PROMPT}"
    return messages


def after_summary(instruction: str, moves: list[Move], rng: random.Random) -> list[dict]:
    """Return the turns after a summary."""
    start = rng.randrange(1, len(moves))
    text = summary_of(moves[:start])["content"]
    return _conversation(f"{instruction}\n\n{SUMMARY_HEADING}\n{text}", moves[start : start + 2 * WINDOW])


def summary_of(moves: list[Move]) -> dict:
    """Return the answer to the request for a summary."""
    return {"role": "assistant", "content": f"Moves so far: {', '.join(move.move for move in moves)}."}


def _conversation(instruction: str, moves: list[Move]) -> list[dict]:
    messages: list[dict] = []
    for move in moves:
        text = move.observation if messages else f"{instruction}\n\n{move.observation}"
        messages += [{"role": "user", "content": text}, move.answer()]
    return messages


if __name__ == "__main__":
    print(tiny_model())
