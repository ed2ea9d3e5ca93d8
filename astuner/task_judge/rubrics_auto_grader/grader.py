"""Learned rubrics, the YAML file that they are stored in, and the judges that grade with them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from astuner.config.data import RubricsConfig, TaskJudgeConfig
from astuner.errors import ConfigError, ServiceError, TaskDataError, field_problems, first_line
from astuner.helper_llm.client import LlmClient
from astuner.schema import Judgement, WorkflowOutput, WorkflowTask
from astuner.task_judge.llm.comparisons import GroupRankingJudge
from astuner.task_judge.llm.rubric_judge import RubricJudge


class Rubrics(BaseModel):
    """The rubrics of a grader.

    Attributes:
        grader_mode: `pointwise` or `listwise`.
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
            reason = field_problems(error, "the file")[0] if isinstance(error, ValidationError) else first_line(error)
            raise TaskDataError(
                f"{path} contains no rubrics ({reason}); expected a YAML file with name, grader_mode and a list "
                "`rubrics`, or remove the file to learn the rubrics again"
            ) from error


class PointwiseRubricsGrader(RubricJudge):
    """Scores one answer at a time by learned rubrics; the reward is a score from `min_score` to `max_score`."""

    async def judged(self, question: str, answer: str, reference: str = "") -> Judgement:
        """Return the judgement of an answer."""
        return in_range(await super().judged(question, answer, reference), self.config.rubrics_auto_grader)


class ListwiseRubricsGrader(GroupRankingJudge):
    """Ranks the answers of a group by learned rubrics; the rewards go from `max_score` to `min_score`."""

    async def judged(self, question: str, answer: str, reference: str = "") -> Judgement:
        """Return the judgement for a single answer, which has a score instead of a rank."""
        return in_range(await super().judged(question, answer, reference), self.config.rubrics_auto_grader)

    async def compute_group_rewards(
        self, workflow_task: WorkflowTask, workflow_outputs: Sequence[WorkflowOutput]
    ) -> Sequence[Judgement]:
        """Score the episodes of one task."""
        judgements = await super().compute_group_rewards(workflow_task, workflow_outputs)
        return [in_range(judgement, self.config.rubrics_auto_grader) for judgement in judgements]


def make_grader(config: TaskJudgeConfig, rubrics: Rubrics, client: LlmClient | None = None) -> RubricJudge:
    """Return the judge for learned rubrics.

    Args:
        config: the section `task_judge`.
        client: the client of the LLM; None to create it.

    Raises:
        ConfigError: the rubrics are for the other grader mode, or there is no key for the endpoint.
    """
    settings = config.rubrics_auto_grader
    if rubrics.grader_mode != settings.grader_mode:
        raise ConfigError(
            f"the rubrics of {rubrics.name} are {rubrics.grader_mode}, and task_judge.rubrics_auto_grader.grader_mode "
            f"is {settings.grader_mode}; set the same mode, or remove the file of the rubrics to learn them again"
        )
    params: dict[str, Any] = {
        "rubric": rubrics.text(),
        "min_score": settings.min_score,
        "max_score": settings.max_score,
        "query_field": settings.query_field,
        "answer_field": settings.answer_field,
        "reference_field": None,
        "language": settings.language,
        "evaluation_prompt": settings.custom_evaluation_prompt,
        "client": client or grading_client(config),
    }
    return (ListwiseRubricsGrader if settings.grader_mode == "listwise" else PointwiseRubricsGrader)(config, **params)


def grading_client(config: TaskJudgeConfig) -> LlmClient:
    """Return a client of the grading model.

    Raises:
        ConfigError: there is no key for the endpoint.
    """
    settings = config.rubrics_auto_grader
    llm = config.llm.model_copy(update={"max_retries": settings.max_retries})
    return LlmClient(llm, settings.model_name, config.alien_llm_response_length)


def in_range(judgement: Judgement, settings: RubricsConfig) -> Judgement:
    """Return a judgement whose reward from 0 to 1 is scaled to the range of scores."""
    if judgement.reward is None:
        return judgement
    reward = settings.min_score + judgement.reward * (settings.max_score - settings.min_score)
    return replace(judgement, reward=reward, is_success=reward >= settings.success_threshold)
