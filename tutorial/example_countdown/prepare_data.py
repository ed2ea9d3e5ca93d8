"""Generate the tasks of countdown_tiny.yaml: three numbers, and a target that they can make with + and -.

The tasks are seeded. The two splits share no set of numbers and target, in any order. A run generates them
automatically, because the `file_path` keys of the YAML file name the two functions below.
"""

import itertools
import json
import os
import random
from pathlib import Path

SEED = 11
LARGEST = 10
TRAINING_TASKS = 1280
VALIDATION_TASKS = 200
FOLDER = Path(__file__).parent / "data"

Puzzle = tuple[tuple[int, ...], int]
"""Three numbers, the largest first, and the target."""


def sums(numbers: tuple[int, ...]) -> list[tuple[list[int], int]]:
    """Return the sums of three numbers with positive and negative signs, as (signed numbers, value) pairs."""
    x, y, z = numbers
    ways = [[x, y, z], [x, y, -z], [x, -y, z], [x, -y, -z], [y, z, -x]]
    return [(way, sum(way)) for way in ways]


def puzzles() -> tuple[list[Puzzle], list[Puzzle]]:
    """Return the puzzles for training, and those for validation."""
    triples = itertools.combinations_with_replacement(range(LARGEST, 0, -1), 3)
    every = sorted({(numbers, target) for numbers in triples for _, target in sums(numbers) if target > 0})
    random.Random(SEED).shuffle(every)
    return every[VALIDATION_TASKS:], every[:VALIDATION_TASKS]


def make_task(puzzle: Puzzle, rng: random.Random) -> dict:
    """Return a task with the numbers in random order."""
    numbers, target = rng.sample(puzzle[0], 3), puzzle[1]
    return {
        "question": f"Numbers: {' '.join(map(str, numbers))}. Target: {target}.",
        "numbers": numbers,
        "target": target,
    }


def training_file() -> Path:
    """Write the training tasks and return the path of the file."""
    rng = random.Random(SEED)
    training, _ = puzzles()
    distinct: dict[str, dict] = {}
    while len(distinct) < TRAINING_TASKS:
        task = make_task(rng.choice(training), rng)
        distinct[task["question"]] = task
    return _write("train.jsonl", list(distinct.values()))


def validation_file() -> Path:
    """Write the validation tasks and return the path of the file."""
    rng = random.Random(SEED)
    return _write("validation.jsonl", [make_task(puzzle, rng) for puzzle in puzzles()[1]])


def _write(name: str, tasks: list[dict]) -> Path:
    FOLDER.mkdir(exist_ok=True)
    path, unfinished = FOLDER / name, FOLDER / f"{name}.{os.getpid()}"
    unfinished.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return unfinished.replace(path)  # atomic, because another run may be reading the file


if __name__ == "__main__":
    print(training_file(), validation_file(), sep="\n")
