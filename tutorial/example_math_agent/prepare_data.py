"""Generate the arithmetic tasks of math_agent_tiny.yaml.

The tasks are seeded, and the two splits share no question. A run generates them automatically, because the `file_path`
keys of the YAML file name the two functions below. `python tutorial/example_math_agent/prepare_data.py` writes the same
files by hand.
"""

import json
import os
import random
from pathlib import Path

SEED = 7
TRAINING_TASKS = 640
VALIDATION_TASKS = 200
FOLDER = Path(__file__).parent / "data"


def make_task(rng: random.Random) -> dict[str, str]:
    """Return a question about two two-digit numbers, with its answer."""
    left, right = rng.randint(10, 99), rng.randint(10, 99)
    operator = rng.choice("+-*")
    answer = {"+": left + right, "-": left - right, "*": left * right}[operator]
    return {"question": f"What is {left} {operator} {right}?", "answer": str(answer)}


def make_splits() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return the training tasks and the validation tasks."""
    rng = random.Random(SEED)
    distinct: dict[str, dict[str, str]] = {}
    while len(distinct) < TRAINING_TASKS + VALIDATION_TASKS:
        task = make_task(rng)
        distinct[task["question"]] = task
    tasks = list(distinct.values())
    return tasks[VALIDATION_TASKS:], tasks[:VALIDATION_TASKS]


def training_file() -> Path:
    """Write the training tasks and return the path of the file."""
    return _write("train.jsonl", make_splits()[0])


def validation_file() -> Path:
    """Write the validation tasks and return the path of the file."""
    return _write("validation.jsonl", make_splits()[1])


def _write(name: str, tasks: list[dict[str, str]]) -> Path:
    FOLDER.mkdir(exist_ok=True)
    path, unfinished = FOLDER / name, FOLDER / f"{name}.{os.getpid()}"
    unfinished.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return unfinished.replace(path)  # atomic, because another run may be reading the file


if __name__ == "__main__":
    print(training_file(), validation_file(), sep="\n")
