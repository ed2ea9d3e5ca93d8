"""The tasks: questions of three generators of Reasoning Gym, and the expressions of their answers.

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
from tutorial.example_real_model.smollm2 import require_package

TRAINING_TASKS = 400
VALIDATION_TASKS = 60
FOLDER = Path(__file__).parent / "data"


def sum_expression(question: str) -> str:
    """Return the expression in a question of `chain_sum`."""
    return question.rpartition(":")[2].rpartition("=")[0].strip()


def equation_expression(question: str) -> str:
    """Return the expression of the unknown of a linear equation that has the unknown on its left side."""
    left, right = re.search(r"(\S+(?: [+-] \S+)*) = (-?\d+)", question).groups()
    constant, factor = 0, 0
    for sign, term in re.findall(r"(^|[+-]) ?([^ +-]+)", left):
        number, unknown = re.fullmatch(r"(?:(\d+)\*?)?([a-z]?)", term).groups()
        value = int(number or 1) * (-1 if sign == "-" else 1)
        if unknown:
            factor += value
        else:
            constant += value
    if factor < 0:
        rest = f"{constant} - {right}"
    elif constant == 0:
        rest = right
    else:
        rest = f"{right} {'-' if constant > 0 else '+'} {abs(constant)}"
    if abs(factor) == 1:
        return rest
    return f"({rest}) / {abs(factor)}" if " " in rest else f"{rest} / {abs(factor)}"


def leg_expression(question: str) -> str:
    """Return the expression of the number of legs of the animals in a question."""
    from reasoning_gym.arithmetic.leg_counting import ANIMALS

    terms = []
    for count, animals in re.findall(r"(\d+) ([a-z ]+)", question.rpartition("if you have ")[2]):
        legs = next(ANIMALS[name] for name in (animals, animals.removesuffix("s")) if name in ANIMALS)
        terms.append(f"{count} * {legs}")
    return " + ".join(terms)


@dataclass(frozen=True)
class Generator:
    """A generator of Reasoning Gym.

    Attributes:
        name: The generator.
        params: Its parameters.
        expression: Returns the expression whose value is the answer to a question.
    """

    name: str
    params: dict
    expression: Callable[[str], str]

    def tasks(self, split: str, first: int, count: int) -> list[dict]:
        """Return tasks of a split, with `question` and `answer`."""
        require_package("reasoning_gym")
        params = {"train_tasks": 10_000, "validation_tasks": 10_000, **self.params}
        environment = load_environment(f"reasoning_gym/{self.name}", params)
        entries = [environment.task(split, str(number)).data for number in range(first, first + count)]
        return [{"question": entry["question"].strip(), "answer": entry["answer"]} for entry in entries]


SMALL_SUMS = Generator("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}, sum_expression)
SUMS = Generator("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 3}, sum_expression)
EQUATIONS = Generator("simple_equations", {"min_terms": 2, "max_terms": 2, "max_value": 20}, equation_expression)
LEGS = Generator("leg_counting", {"min_animals": 2, "max_animals": 3, "max_instances": 15}, leg_expression)


def _file(name: str, generator: Generator, split: str, count: int) -> Path:
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}_{split}.jsonl"
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text("".join(json.dumps(task) + "\n" for task in generator.tasks(split, 0, count)))
    return unfinished.replace(path)  # atomic, because another run may be reading the file


def small_sums_for_training() -> Path:
    """Write the small sums for training."""
    return _file("small_sums", SMALL_SUMS, "train", TRAINING_TASKS)


def small_sums_for_validation() -> Path:
    """Write the held-out small sums."""
    return _file("small_sums", SMALL_SUMS, "validation", VALIDATION_TASKS)


def sums_for_training() -> Path:
    """Write the sums for training."""
    return _file("sums", SUMS, "train", TRAINING_TASKS)


def sums_for_validation() -> Path:
    """Write the held-out sums."""
    return _file("sums", SUMS, "validation", VALIDATION_TASKS)


def equations_for_training() -> Path:
    """Write the equations for training."""
    return _file("equations", EQUATIONS, "train", TRAINING_TASKS)


def equations_for_validation() -> Path:
    """Write the held-out equations."""
    return _file("equations", EQUATIONS, "validation", VALIDATION_TASKS)


def legs_for_training() -> Path:
    """Write the legs for training."""
    return _file("legs", LEGS, "train", TRAINING_TASKS)


def legs_for_validation() -> Path:
    """Write the held-out legs."""
    return _file("legs", LEGS, "validation", VALIDATION_TASKS)
