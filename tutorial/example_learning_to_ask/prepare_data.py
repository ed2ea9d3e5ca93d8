"""Generate the tasks of learning_to_ask_tiny.yaml: patients who state some of their facts, and hide the others.

The tasks are seeded, and the two splits share no request. A run generates them automatically, because the `file_path`
keys of the YAML file name the two functions below.
"""

import json
import os
import random
import zlib
from pathlib import Path

from tutorial.example_learning_to_ask.clinic import RULES, TOPICS, department, statement

SEED = 7
TRAINING_TASKS = 2000
VALIDATION_TASKS = 200
STATED = 0.2
"""The share of the facts that a patient states without being asked."""

FOLDER = Path(__file__).parent / "data"


def tasks() -> tuple[list[dict], list[dict]]:
    """Return the tasks for training, and those for validation."""
    rng = random.Random(SEED)
    distinct: dict[str, dict] = {}
    while len(distinct) < 2 * TRAINING_TASKS:
        facts = {topic: rng.random() < 0.5 for topic in TOPICS}
        stated = [topic for topic in TOPICS if rng.random() < STATED]
        task = make_task(rng.choice(list(RULES)), facts, rng.sample(stated, len(stated)))
        distinct[json.dumps(task)] = task
    training: list[dict] = []
    validation: list[dict] = []
    for task in distinct.values():
        (validation if _is_held_out(task["question"]) else training).append(task)
    return training[:TRAINING_TASKS], validation[:VALIDATION_TASKS]


def _is_held_out(question: str) -> bool:
    """Return whether a request is for validation. A seventh of those with a stated fact is."""
    return question.count(".") > 1 and zlib.crc32(question.encode()) % 7 == 0


def make_task(complaint: str, facts: dict[str, bool], stated: list[str]) -> dict:
    """Return a task: a request with the facts that the patient states without being asked, and the hidden profile."""
    sentences = [f"I have {complaint}.", *(statement(topic, facts[topic]) for topic in stated)]
    return {
        "question": " ".join(sentences),
        "complaint": complaint,
        "facts": facts,
        "stated": stated,
        "department": department(complaint, facts),
    }


def training_file() -> Path:
    """Write the training tasks and return the path of the file."""
    return _write("train.jsonl", tasks()[0])


def validation_file() -> Path:
    """Write the validation tasks and return the path of the file."""
    return _write("validation.jsonl", tasks()[1])


def _write(name: str, rows: list[dict]) -> Path:
    FOLDER.mkdir(exist_ok=True)
    path, unfinished = FOLDER / name, FOLDER / f"{name}.{os.getpid()}"
    unfinished.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return unfinished.replace(path)  # atomic, because another run may be reading the file


if __name__ == "__main__":
    print(training_file(), validation_file(), sep="\n")
