"""The tasks: questions of four generators of Reasoning Gym, and how two kinds of them are worked out.

The two splits have no question in common. A run generates its tasks automatically, because the `file_path` keys of the
YAML files name the functions below.
"""

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from astuner.env_service import load_environment

TRAINING_TASKS = 600
VALIDATION_TASKS = 100
FOLDER = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Generator:
    """A generator of Reasoning Gym.

    Attributes:
        name: The generator.
        params: Its parameters.
        work_out: Returns the steps from a question to its answer, one a line; None if the transcripts have none.
    """

    name: str
    params: dict
    work_out: Callable[[str], list[str]] | None = None

    def tasks(self, split: str, first: int, count: int) -> list[dict]:
        """Return tasks of a split, with `question` and `answer`."""
        params = {"train_tasks": 10_000, "validation_tasks": 10_000, **self.params}
        environment = load_environment(f"reasoning_gym/{self.name}", params)
        entries = [environment.task(split, str(number)).data for number in range(first, first + count)]
        return [{"question": entry["question"].strip(), "answer": entry["answer"]} for entry in entries]


def solve_equation(question: str) -> list[str]:
    """Return the steps that solve a linear equation with one unknown on its left side."""
    left, right = re.search(r"(\S+(?: [+-] \S+)*) = (-?\d+)", question).groups()
    constant, factor, unknown = 0, 0, ""
    for sign, term in re.findall(r"(^|[+-]) ?([^ +-]+)", left):
        number, letter = re.fullmatch(r"(?:(\d+)\*?)?([a-z]?)", term).groups()
        value = int(number or 1) * (-1 if sign == "-" else 1)
        if letter:
            factor, unknown = factor + value, letter
        else:
            constant += value
    rest, steps = int(right) - constant, []
    scaled = {1: unknown, -1: f"-{unknown}"}.get(factor, f"{factor}*{unknown}")
    if constant:
        operation = f"{right} - {constant}" if constant > 0 else f"{right} + {-constant}"
        steps.append(f"{scaled} = {operation} = {rest}")
    if factor != 1:
        steps.append(f"{unknown} = {rest} / {factor} = {rest // factor}")
    return steps


def count_legs(question: str) -> list[str]:
    """Return the legs of each kind of animal, and their sum."""
    from reasoning_gym.arithmetic.leg_counting import ANIMALS

    steps, legs = [], []
    for count, animals in re.findall(r"(\d+) ([a-z ]+)", question.rpartition("if you have ")[2]):
        each = next(ANIMALS[name] for name in (animals, animals.removesuffix("s")) if name in ANIMALS)
        legs.append(int(count) * each)
        steps.append(f"{count} {animals}: {count} * {each} = {legs[-1]}")
    return [*steps, f"{' + '.join(map(str, legs))} = {sum(legs)}"]


SUMS = Generator("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2})
EQUATIONS = Generator("simple_equations", {"min_terms": 2, "max_terms": 2, "max_value": 10}, solve_equation)
LEGS = Generator("leg_counting", {"min_animals": 2, "max_animals": 2, "max_instances": 9}, count_legs)
PRODUCTS = Generator("products", {"min_digits": 3, "max_digits": 3})


def _file(generator: Generator, split: str, count: int) -> Path:
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{generator.name}_{split}.jsonl"
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text("".join(json.dumps(task) + "\n" for task in generator.tasks(split, 0, count)))
    return unfinished.replace(path)  # atomic, because another run may be reading the file


def sums_for_training() -> Path:
    """Write the tasks of sums.yaml."""
    return _file(SUMS, "train", TRAINING_TASKS)


def sums_for_validation() -> Path:
    """Write the held-out tasks of sums.yaml."""
    return _file(SUMS, "validation", VALIDATION_TASKS)


def equations_for_training() -> Path:
    """Write the tasks of equations.yaml."""
    return _file(EQUATIONS, "train", TRAINING_TASKS)


def equations_for_validation() -> Path:
    """Write the held-out tasks of equations.yaml."""
    return _file(EQUATIONS, "validation", VALIDATION_TASKS)


def legs_for_training() -> Path:
    """Write the tasks of legs.yaml."""
    return _file(LEGS, "train", TRAINING_TASKS)


def legs_for_validation() -> Path:
    """Write the held-out tasks of legs.yaml."""
    return _file(LEGS, "validation", VALIDATION_TASKS)


def products_for_training() -> Path:
    """Write the tasks of products.yaml."""
    return _file(PRODUCTS, "train", TRAINING_TASKS)


def products_for_validation() -> Path:
    """Write the held-out tasks of products.yaml."""
    return _file(PRODUCTS, "validation", VALIDATION_TASKS)
