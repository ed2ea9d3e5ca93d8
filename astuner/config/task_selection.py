"""Sections on which tasks a run uses: the entries of `task_reader.filters`, and `task_reader.curriculum`."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from astuner.config.section import Count, FunctionPath, NonNegativeInt, PositiveInt, Section

Rate = Annotated[float, Field(ge=0, le=1)]


def _pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"a regular expression of Python's re ({error})") from error
    return pattern


class _StaticFilter(Section):
    """A filter that is applied once, when the tasks are read."""

    validation: bool = False
    """Also filter the validation tasks."""


class LengthFilter(_StaticFilter):
    """Keep the tasks whose prompt, the question and the messages before it, has a length within the bounds."""

    type: Literal["length"]
    """`length`."""
    unit: Literal["characters", "tokens"] = "characters"
    """What is counted; tokens are those of the model's tokenizer, without the chat template."""
    min: NonNegativeInt = 0
    """Minimum length."""
    max: PositiveInt | None = None
    """Maximum length; null for none."""

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.max is None and self.min == 0:
            raise ValueError("expected min or max")
        if self.max is not None and self.min > self.max:
            raise ValueError("expected min not above max")
        return self


class DuplicateFilter(_StaticFilter):
    """Keep the first of several tasks with similar prompts. MinHash finds candidates, which are then compared."""

    type: Literal["deduplicate"]
    """`deduplicate`."""
    threshold: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Two prompts are similar if the Jaccard similarity of their n-gram sets is at least this value."""
    ngram: Count = 3
    """Number of words in an n-gram."""
    permutations: Annotated[int, Field(ge=16, le=1024)] = 128
    """Number of hash functions; with more, more tasks whose similarity is close to the threshold are found."""


class RegexFilter(_StaticFilter):
    """Keep or drop the tasks with a field that a regular expression matches."""

    type: Literal["regex"]
    """`regex`."""
    pattern: Annotated[str, AfterValidator(_pattern)]
    """The regular expression; it may match any part of the field."""
    field: str = "main_query"
    """main_query, task_id, source, or a field of the task's metadata."""
    action: Literal["keep", "drop"] = "keep"
    """keep: keep only the tasks that match; drop: leave them out."""


class FunctionFilter(_StaticFilter):
    """Keep the tasks for which a function of yours returns True."""

    type: Literal["function"]
    """`function`."""
    function: FunctionPath
    """`package.module->function`, which takes a Task and returns True to keep it or False to leave it out."""


class DifficultyFilter(Section):
    """Leave out training tasks that are always or never solved. It acts during training."""

    type: Literal["difficulty"]
    """`difficulty`."""
    window: Annotated[int, Field(ge=1, le=1000)] = 2
    """Number of the latest steps with a task over which its success is averaged; fewer leave out no task."""
    min: Rate = 0.0
    """A task whose mean success is at most this is too hard."""
    max: Rate = 1.0
    """A task whose mean success is at least this is too easy."""
    retry_after: PositiveInt | None = None
    """Number of training steps after which a task is tried again; null for never."""

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.min >= self.max:
            raise ValueError("expected min less than max")
        return self


def _type_of(item: Any) -> Any:
    return item.get("type") if isinstance(item, dict) else getattr(item, "type", None)


TaskFilter = Annotated[
    Annotated[LengthFilter, Tag("length")]
    | Annotated[DuplicateFilter, Tag("deduplicate")]
    | Annotated[RegexFilter, Tag("regex")]
    | Annotated[FunctionFilter, Tag("function")]
    | Annotated[DifficultyFilter, Tag("difficulty")],
    # A discriminator that is named by its field excludes validators such as that of `Section`.
    Discriminator(_type_of),
]


class CurriculumConfig(Section):
    """`task_reader.curriculum`: choice of the training tasks by their recent success."""

    enable: bool = False
    """Draw each batch at random, with preference for tasks that are solved in half of the episodes."""
    window: Count = 2
    """Number of the latest steps with a task over which its success is averaged."""
    min_weight: Annotated[float, Field(gt=0, le=1)] = 0.05
    """Weight of tasks that are always or never solved; a task that is solved half the time has weight 1."""
