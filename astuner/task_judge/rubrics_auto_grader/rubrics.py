"""Learned rubrics, and the YAML file that they are stored in."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from astuner.errors import ServiceError, TaskDataError, first_line


class Rubrics(BaseModel):
    """The rubrics of a grader.

    Attributes:
        name: the name of the grader.
        grader_mode: `pointwise` or `listwise`.
        rubrics: the criteria.
        agreement: the share of held-out samples on which the grader agrees with the references, from 0 to 1; None if it
            was not measured.
        held_out: the number of comparisons behind it.
        samples: the number of samples that the rubrics were learned from.
        epochs: the number of rounds in which they were tested.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    grader_mode: Literal["pointwise", "listwise"]
    rubrics: tuple[str, ...] = Field(min_length=1)
    agreement: float | None = None
    held_out: int = 0
    samples: int = 0
    epochs: int = 0

    def text(self) -> str:
        """Return the rubrics as a numbered list."""
        return "\n".join(f"{number}. {rubric}" for number, rubric in enumerate(self.rubrics, 1))

    def save(self, path: Path) -> None:
        """Write the rubrics as YAML; a reader sees the whole file or none.

        Raises:
            ServiceError: the file cannot be written.
        """
        text = yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)
        part = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(text, encoding="utf-8")
            part.replace(path)
        except OSError as error:
            raise ServiceError(
                f"the learned rubrics cannot be written to {path} ({error.strerror}); set "
                "task_judge.rubrics_auto_grader.rubrics_path to a file that can be written"
            ) from error

    @staticmethod
    def load(path: Path) -> Rubrics:
        """Read rubrics; only `name`, `grader_mode` and `rubrics` are required.

        Raises:
            TaskDataError: the file contains no rubrics.
        """
        try:
            return Rubrics.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, yaml.YAMLError) as error:
            reason = first_line(error)
            if isinstance(error, ValidationError):
                details = error.errors(include_url=False)[0]
                reason = f"{'.'.join(map(str, details['loc'])) or 'the file'}: {details['msg']}"
            raise TaskDataError(
                f"{path} contains no rubrics ({reason}); expected a YAML file with name, grader_mode and a list "
                "`rubrics`, or remove the file to learn the rubrics again"
            ) from error
