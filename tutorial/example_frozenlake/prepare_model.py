"""Create the starting model of frozenlake_tiny.yaml, which has about 0.2 M parameters.

A randomly initialised Qwen3 model is fine-tuned with astuner's supervised training on seeded transcripts in which 40%
of the moves are random and the others lead to the goal. Such a player rarely arrives within eight moves, and
reinforcement learning can improve on it. The maps of the transcripts belong to the training split. The model is cached
in the user's cache folder under a name that contains a hash of this recipe.
"""

import random
from collections import deque
from pathlib import Path

from astuner.env_service import Environment, load_environment
from tutorial.starting_model import Recipe, starting_model

RECIPE = Recipe(
    "frozenlake_tiny",
    hidden_size=64,
    intermediate_size=192,
    heads=4,
    head_dim=16,
    context=1024,
    vocabulary=768,
    isolated="[PFHGS\n]",
    batch=32,
)
TRANSCRIPTS = 25_600
RANDOM_MOVES = 0.4
MAX_MOVES = 8
MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}


def tiny_model() -> Path:
    """Return the folder of the starting model. Create the model if it does not exist."""
    return starting_model(RECIPE, transcripts, [Path(__file__)])


def transcripts() -> list[dict]:
    """Return the games on maps of the training split."""
    rng = random.Random(RECIPE.seed)
    environment = load_environment("gymnasium/FrozenLake-v1", {"train_tasks": 4000, "seed": 1})
    ids = list(environment.task_ids("train"))
    return [transcript(environment, ids[number % len(ids)], rng) for number in range(TRANSCRIPTS)]


def board(text: str) -> tuple[dict[tuple[int, int], str], tuple[int, int]]:
    """Return the cells of the map of an observation, by row and column, and the place of the player."""
    rows = [row for row in text.splitlines() if row and set(row) <= set("PFHGS")]
    cells = {(r, c): cell for r, row in enumerate(rows) for c, cell in enumerate(row)}
    return cells, next(place for place, cell in cells.items() if cell == "P")


def best_moves(text: str) -> list[str]:
    """Return the first moves of the shortest paths to the goal, in the map of an observation."""
    cells, start = board(text)
    goal = next(place for place, cell in cells.items() if cell == "G")
    distance, queue = {goal: 0}, deque([goal])
    while queue:
        row, column = queue.popleft()
        for down, right in MOVES.values():
            place = (row - down, column - right)
            if cells.get(place, "H") != "H" and place not in distance:
                distance[place] = distance[row, column] + 1
                queue.append(place)
    after = {move: (start[0] + down, start[1] + right) for move, (down, right) in MOVES.items()}
    return [move for move, place in after.items() if distance.get(place, 99) < distance[start]]


def transcript(environment: Environment, task_id: str, rng: random.Random) -> dict:
    """Return a game with random moves, as a conversation in the form of the agent loop's."""
    observation = environment.reset("train", task_id, 0).text
    instruction = environment.profile("train", task_id).main_query
    messages = [{"role": "user", "content": f"{instruction}\n\n{observation}"}]
    for _ in range(MAX_MOVES):
        move = rng.choice(list(MOVES) if rng.random() < RANDOM_MOVES else best_moves(observation))
        messages.append({"role": "assistant", "content": move})
        result = environment.step(move)
        if result.is_done:
            break
        observation = result.observation.text
        messages.append({"role": "user", "content": observation})
    return {"messages": messages if messages[-1]["role"] == "assistant" else messages[:-1]}


if __name__ == "__main__":
    print(tiny_model())
