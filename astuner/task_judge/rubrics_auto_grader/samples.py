"""The reference samples that rubrics are learned from and tested on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from astuner.config.data import RubricsConfig
from astuner.errors import TaskDataError, shorten
from astuner.schema import Task, TaskSet

MIN_SAMPLES = 2
_HELD_OUT = 4
"""One sample in this many is held out."""


@dataclass(frozen=True, slots=True)
class ReferenceSample:
    """A question with answers of known scores.

    Attributes:
        question: the question.
        answers: the answers and their scores, the best one first.
    """

    question: str
    answers: tuple[tuple[str, float], ...]

    @property
    def best(self) -> str:
        """The answer with the highest score."""
        return self.answers[0][0]


def reference_samples(tasks: TaskSet, config: RubricsConfig) -> tuple[list[ReferenceSample], list[ReferenceSample]]:
    """Return the samples to learn from, and those that are held out.

    A sample has its own answer with a score (`answer_field`, `score_field`), the reference answer, whose score is
    `max_score`, or both. A sample that has no wrong answer also has the next different reference among the other
    samples, whose score is `min_score`.

    Raises:
        TaskDataError: there are too few samples, or one has no answer.
    """
    training = list(tasks.training[: config.num_reference_samples])
    validation = list(tasks.validation[: config.num_reference_samples])
    if not validation:
        # Spread over the file, which may be sorted.
        validation = training[_HELD_OUT - 1 :: _HELD_OUT] or training[-1:]
        training = [task for task in training if task not in validation]
    if not training or len(training) + len(validation) < MIN_SAMPLES:
        raise TaskDataError(
            f"rubrics_auto_grader needs at least {MIN_SAMPLES} reference samples, and there are "
            f"{len(training) + len(validation)} (num_reference_samples is {config.num_reference_samples})"
        )
    everything = [*training, *validation]
    return ([_sample(t, everything, config) for t in training], [_sample(t, everything, config) for t in validation])


def _sample(task: Task, tasks: Sequence[Task], config: RubricsConfig) -> ReferenceSample:
    row = task.metadata
    answers: dict[str, float] = {}
    reference = _text(row, config.reference_field)
    if reference:
        answers[reference] = config.max_score
    candidate = _text(row, config.answer_field)
    if candidate and config.score_field in row:
        answers.setdefault(candidate, _score(row, task, config))
    if not answers:
        keys = ", ".join(sorted(map(str, row))) or "none"
        raise TaskDataError(
            f"reference sample {shorten(task.task_id)} has neither {config.reference_field!r} (a reference answer) nor "
            f"{config.answer_field!r} with {config.score_field!r} (an answer with its score). Its fields: {keys}. Set "
            "task_judge.rubrics_auto_grader.reference_field, answer_field or score_field"
        )
    if min(answers.values()) >= config.success_threshold:
        start = tasks.index(task)
        others = (_text(other.metadata, config.reference_field) for other in (*tasks[start + 1 :], *tasks[:start]))
        wrong = next((other for other in others if other and other not in answers), None)
        if wrong is not None:
            answers[wrong] = config.min_score
    question = _text(row, config.query_field) or task.main_query
    return ReferenceSample(question, tuple(sorted(answers.items(), key=lambda answer: -answer[1])))


def _score(row: Mapping[str, Any], task: Task, config: RubricsConfig) -> float:
    value = row[config.score_field]
    value = value.item() if hasattr(value, "item") else value
    in_range = isinstance(value, int | float) and config.min_score <= value <= config.max_score
    if isinstance(value, bool) or not in_range:
        raise TaskDataError(
            f"reference sample {shorten(task.task_id)} has {config.score_field} {value!r}; expected a number from "
            f"min_score {config.min_score:g} to max_score {config.max_score:g}"
        )
    return float(value)


def _text(row: Mapping[str, Any], field: str) -> str:
    value = row.get(field)
    return "" if value is None else str(value)
