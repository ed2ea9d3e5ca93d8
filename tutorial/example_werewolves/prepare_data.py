"""Generate the tasks of werewolves_tiny.yaml: who plays, in which order, and with which roles.

The tasks are seeded, and the two splits share no deal. A run generates them automatically, because the `file_path` keys
of the YAML file name the two functions below.
"""

import json
import os
import random
from pathlib import Path

from tutorial.example_werewolves.game import SEER, VILLAGER, WEREWOLF, Roles

SEED = 5
NAMES = tuple(f"Player{number}" for number in range(1, 10))
DECK = (WEREWOLF, SEER, VILLAGER, VILLAGER, VILLAGER, VILLAGER)
TRAINING_TASKS = 1000
VALIDATION_TASKS = 100
FOLDER = Path(__file__).parent / "data"


def deals() -> tuple[list[Roles], list[Roles]]:
    """Return the deals for training, and those for validation."""
    rng = random.Random(SEED)
    distinct: dict[tuple[tuple[str, str], ...], Roles] = {}
    while len(distinct) < VALIDATION_TASKS + TRAINING_TASKS:
        roles = deal(rng)
        distinct[tuple(roles.items())] = roles
    every = list(distinct.values())
    return every[VALIDATION_TASKS:], every[:VALIDATION_TASKS]


def deal(rng: random.Random) -> Roles:
    """Return players in random order, each with a role."""
    return dict(zip(rng.sample(NAMES, len(DECK)), rng.sample(DECK, len(DECK)), strict=True))


def make_task(roles: Roles) -> dict:
    """Return the task of a deal."""
    dealt = ", ".join(f"{player} is a {role}" for player, role in roles.items())
    return {"question": f"{dealt}.", "players": list(roles), "roles": list(roles.values())}


def training_file() -> Path:
    """Write the training tasks and return the path of the file."""
    return _write("train.jsonl", deals()[0])


def validation_file() -> Path:
    """Write the validation tasks and return the path of the file."""
    return _write("validation.jsonl", deals()[1])


def _write(name: str, roles: list[Roles]) -> Path:
    FOLDER.mkdir(exist_ok=True)
    path, unfinished = FOLDER / name, FOLDER / f"{name}.{os.getpid()}"
    unfinished.write_text("".join(json.dumps(make_task(each)) + "\n" for each in roles))
    return unfinished.replace(path)  # atomic, because another run may be reading the file


if __name__ == "__main__":
    print(training_file(), validation_file(), sep="\n")
