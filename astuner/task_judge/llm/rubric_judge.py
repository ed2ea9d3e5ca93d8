"""A judge that scores each answer by a rubric."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel

from astuner.config.data import TaskJudgeConfig
from astuner.errors import ConfigError
from astuner.helper_llm.client import LlmClient, NoAnswer
from astuner.schema import Judgement, WorkflowOutput, WorkflowTask
from astuner.task_judge.judge_base import answer_text
from astuner.task_judge.llm.llm_judge import LlmJudge, question_of, undecided, unscored
from astuner.task_judge.llm.prompts import FencedPrompt, Language, fenced_prompt

DEFAULT_RUBRIC = "The answer is correct, complete, relevant to the question, and clearly written."
_SCORE = "score"
_TASKS = {
    "en": (
        "You grade the answer to a question by these criteria, each with a score from {min_score} (not met) to "
        "{max_score} (fully met):\n{rubrics}"
    ),
    "zh": "请按以下标准为问题的回答评分，每项标准的分数从 {min_score}（不满足）到 {max_score}（完全满足）：\n{rubrics}",
}
_FORMS = {
    "en": (
        'Answer with one JSON object: {"reason": "one or two sentences", "scores": {{names}}}. Use null as the score '
        "of a criterion that you cannot judge."
    ),
    "zh": '请用一个 JSON 对象回答：{"reason": "一两句话", "scores": {{names}}}。无法判断的标准的分数为 null。',
}


class RubricScores(BaseModel):
    """The LLM's answer: its reasons, and a score for each criterion; null if it cannot tell."""

    reason: str = ""
    scores: dict[str, float | None]


class RubricJudge(LlmJudge):
    """Scores an answer with an LLM by one or several criteria.

    The reward is the mean of the criteria's scores, scaled to the range from 0 to 1.

    Args:
        config: the section `task_judge`.
        rubric: the criterion, or several by name; the reward then has a component for each.
        min_score, max_score: the range of the scores that the LLM gives.
        success_threshold: the lowest reward, from 0 to 1, of an episode that solved its task.
        query_field: the field of the data row with the question.
        answer_field: the field of the workflow's output metadata with the agent's answer.
        reference_field: the field of the data row with a reference answer, which the LLM sees if there is one; None
            to show none.
        evaluation_prompt: the instructions to the LLM, in which `{rubrics}`, `{min_score}` and `{max_score}` are
            replaced; None for those of this judge.
        client: the client of the LLM; None to create it.

    Raises:
        ConfigError: the range is empty, or there is no criterion or no key.
    """

    def __init__(
        self,
        config: TaskJudgeConfig,
        *,
        rubric: str | Mapping[str, str] = DEFAULT_RUBRIC,
        min_score: float = 0,
        max_score: float = 10,
        success_threshold: float = 0.7,
        query_field: str = "main_query",
        answer_field: str = "final_answer",
        reference_field: str | None = "answer",
        language: Language = "en",
        evaluation_prompt: str | None = None,
        client: LlmClient | None = None,
    ) -> None:
        self.criteria = {_SCORE: rubric} if isinstance(rubric, str) else {str(k): str(v) for k, v in rubric.items()}
        if not self.criteria or not all(text.strip() for text in self.criteria.values()):
            raise ConfigError("task_judge.params.rubric is empty; expected a criterion, or several by name")
        if not min_score < max_score:
            raise ConfigError(f"task_judge.params: min_score {min_score:g} must be below max_score {max_score:g}")
        super().__init__(config, client)
        self.language, self.evaluation_prompt = language, evaluation_prompt
        self.min_score, self.max_score = min_score, max_score
        self.success_threshold = success_threshold
        self.query_field, self.answer_field, self.reference_field = query_field, answer_field, reference_field

    async def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Judgement:
        """Score one episode."""
        metadata = workflow_task.task.metadata
        reference = metadata.get(self.reference_field) if self.reference_field else None
        answer = answer_text(workflow_output, self.answer_field, type(self).__name__)
        question = question_of(workflow_task, self.query_field)
        return await self.judged(question, answer, "" if reference is None else str(reference))

    async def judged(self, question: str, answer: str, reference: str = "") -> Judgement:
        """Return the judgement of an answer."""
        try:
            result = await self.ask(self.prompt(question, answer, reference), RubricScores, self._fault)
        except NoAnswer as error:
            return unscored(error)
        scores = {name: result.value.scores[name] for name in self.criteria}
        known = {name: score for name, score in scores.items() if score is not None}
        if len(known) < len(scores):
            return undecided(result.value.reason, result.usage)
        scaled = {name: (score - self.min_score) / (self.max_score - self.min_score) for name, score in known.items()}
        reward = sum(scaled.values()) / len(scaled)
        return Judgement(
            reward,
            reward >= self.success_threshold,
            components={} if list(scaled) == [_SCORE] else scaled,
            explanation=result.value.reason,
            metrics=result.usage.metrics(),
        )

    def prompt(self, question: str, answer: str, reference: str = "") -> FencedPrompt:
        """Return the prompt for an answer."""
        criteria = "\n".join(f"- {name}: {text}" for name, text in self.criteria.items())
        names = ", ".join(f'"{name}": SCORE' for name in self.criteria)
        task = (self.evaluation_prompt or _TASKS[self.language]).replace("{rubrics}", criteria)
        task = task.replace("{min_score}", f"{self.min_score:g}").replace("{max_score}", f"{self.max_score:g}")
        form = _FORMS[self.language].replace("{names}", names)
        texts = {"question": question, "reference answer": reference, "answer to grade": answer or "(empty)"}
        return fenced_prompt(task, texts, form, self.language)

    def _fault(self, answer: RubricScores) -> str | None:
        for name in self.criteria:
            if name not in answer.scores:
                return f"scores has no {name!r}"
            score = answer.scores[name]
            if score is not None and not self.min_score <= score <= self.max_score:
                return f"the score {score:g} of {name!r} is not from {self.min_score:g} to {self.max_score:g}"
        return None
