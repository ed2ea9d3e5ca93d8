"""Judges that grade with learned rubrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from astuner.errors import ConfigError
from astuner.helper_llm.client import LlmClient
from astuner.schema import Judgement
from astuner.task_judge.llm.comparisons import GroupRankingJudge
from astuner.task_judge.llm.rubric_judge import RubricJudge
from astuner.task_judge.rubrics_auto_grader.rubrics import Rubrics

if TYPE_CHECKING:
    from astuner.config.data import RubricsConfig, TaskJudgeConfig
    from astuner.schema import WorkflowOutput, WorkflowTask


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
        rubrics: the rubrics.
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
