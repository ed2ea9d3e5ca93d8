"""Judges that compare answers: with a reference answer, in pairs, or as a ranked group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel

from astuner.config.data import TaskJudgeConfig
from astuner.errors import ConfigError
from astuner.helper_llm.client import LlmAnswer, NoAnswer
from astuner.helper_llm.usage import LlmUsage
from astuner.schema import Judgement, WorkflowOutput, WorkflowTask
from astuner.task_judge.judge_base import BaseGroupJudge, answer_text, as_text, of_task, task_value
from astuner.task_judge.llm.llm_judge import (
    LlmJudge,
    all_answers,
    question_of,
    undecided,
    unscored,
)
from astuner.task_judge.llm.prompts import fenced_prompt
from astuner.task_judge.llm.rubric_judge import DEFAULT_RUBRIC, RubricJudge

_POINTS = {"first": 1.0, "tie": 0.5, "second": 0.0}


class Comparison(BaseModel):
    """The LLM's answer: which of two answers is better; null if it cannot tell."""

    reason: str = ""
    better: Literal["first", "second", "tie"] | None


class Ranking(BaseModel):
    """The LLM's answer: the numbers of the ranked answers, the best one first."""

    reason: str = ""
    ranking: list[int]


class PairwiseJudge(LlmJudge):
    """Compares each answer with the reference answer of its task, in both orders.

    The reward is 1 if the answer is better in both orders, 0 if the reference is, and otherwise the mean of the two
    comparisons, so that a preference of the LLM for a position cancels out (Zheng et al., "Judging LLM-as-a-judge",
    arXiv:2306.05685).

    Args:
        config: the section `task_judge`.
        rubric: what makes an answer better.
        success_threshold: the lowest reward, from 0 to 1, of an episode that solved its task.
        query_field, answer_field, reference_field: the fields with the question, the agent's answer and the
            reference answer (see `RubricJudge`).
    """

    def __init__(
        self,
        config: TaskJudgeConfig,
        *,
        rubric: str = DEFAULT_RUBRIC,
        success_threshold: float = 0.5,
        query_field: str = "main_query",
        answer_field: str = "final_answer",
        reference_field: str = "answer",
    ) -> None:
        super().__init__(config)
        self.rubric, self.success_threshold = rubric, success_threshold
        self.query_field, self.answer_field, self.reference_field = query_field, answer_field, reference_field

    async def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Judgement:
        """Score one episode."""
        value = task_value(workflow_task, self.reference_field, type(self).__name__)
        reference = as_text(value, self.reference_field, of_task(workflow_task))
        answer = answer_text(workflow_output, self.answer_field, type(self).__name__)
        question = question_of(workflow_task, self.query_field)
        try:
            points, reason, usage = await self.compared(question, answer, reference)
        except NoAnswer as error:
            return unscored(error)
        if points is None:
            return undecided(reason, usage)
        return Judgement(points, points >= self.success_threshold, explanation=reason, metrics=usage.metrics())

    async def compared(self, question: str, one: str, other: str) -> tuple[float | None, str, LlmUsage]:
        """Compare two answers in both orders.

        Returns:
            The points of `one`, from 0 to 1, or None if the LLM cannot tell; the LLM's reasons; its usage.

        Raises:
            NoAnswer: the LLM gave no usable answer.
        """
        answers, usage = await all_answers([self._better(question, one, other), self._better(question, other, one)])
        reason = " / ".join(answer.reason for answer in answers if answer.reason)
        if answers[0].better is None or answers[1].better is None:
            return None, reason, usage
        return (_POINTS[answers[0].better] + 1 - _POINTS[answers[1].better]) / 2, reason, usage

    async def _better(self, question: str, first: str, second: str) -> LlmAnswer[Comparison]:
        task = (
            f"You compare two answers to a question. The better answer is the one that best meets this: {self.rubric}"
        )
        form = (
            'Answer with one JSON object: {"reason": "one or two sentences", "better": "first"}. "better" is "first", '
            '"second" or "tie", or null if you cannot judge the answers.'
        )
        texts = {"question": question, "first answer": first or "(empty)", "second answer": second or "(empty)"}
        return await self.ask(fenced_prompt(task, texts, form), Comparison)


class PairwiseGroupJudge(PairwiseJudge, BaseGroupJudge):
    """Compares a group's answers with each other, in both orders; the reward is the mean of an answer's points.

    A group of one, as in greedy validation, is compared with the reference answer.
    """

    async def compute_group_rewards(
        self, workflow_task: WorkflowTask, workflow_outputs: Sequence[WorkflowOutput]
    ) -> Sequence[Judgement]:
        """Score the episodes of one task. n distinct answers need n (n - 1) questions."""
        answers = [answer_text(output, self.answer_field, type(self).__name__) for output in workflow_outputs]
        distinct = list(dict.fromkeys(answers))
        question = question_of(workflow_task, self.query_field)
        pairs = [(i, j) for i in range(len(distinct)) for j in range(i + 1, len(distinct))]
        orders = [(i, j) for pair in pairs for i, j in (pair, pair[::-1])]
        try:
            compared, usage = await all_answers([self._better(question, distinct[i], distinct[j]) for i, j in orders])
        except NoAnswer as error:
            return shared(unscored(error), len(answers))
        # Equal answers tie with each other.
        points: dict[str, list[float]] = {answer: [0.5] * (answers.count(answer) - 1) for answer in distinct}
        for (i, j), result in zip(orders, compared, strict=True):
            if result.better is not None:
                won = _POINTS[result.better]
                points[distinct[i]] += [won] * answers.count(distinct[j])
                points[distinct[j]] += [1 - won] * answers.count(distinct[i])
        if not all(points.values()):
            return shared(undecided("no pair of answers could be compared", usage), len(answers))
        means = [sum(points[answer]) / len(points[answer]) for answer in answers]
        return group_judgements(means, self.success_threshold, usage)


class GroupRankingJudge(RubricJudge, BaseGroupJudge):
    """Ranks the answers of a group; the rewards range from 1 for the best answer to 0 for the worst.

    The LLM ranks them several times in rotated and reversed orders, and the ranks are averaged. Equal answers have the
    same reward. A group of one, as in greedy validation, is scored as by `RubricJudge`.

    Args:
        config: the section `task_judge`.
        rubric: what makes an answer better.
        passes: a group's number of rankings, which are averaged.
        params: the other parameters of `RubricJudge`.

    Raises:
        ConfigError: a parameter is invalid.
    """

    def __init__(self, config: TaskJudgeConfig, *, rubric: str = DEFAULT_RUBRIC, passes: int = 2, **params: object):
        if passes < 1:
            raise ConfigError(f"task_judge.params.passes is {passes}; expected at least 1")
        super().__init__(config, rubric=rubric, **params)  # type: ignore[arg-type]
        self.passes = passes

    async def compute_group_rewards(
        self, workflow_task: WorkflowTask, workflow_outputs: Sequence[WorkflowOutput]
    ) -> Sequence[Judgement]:
        """Score the episodes of one task."""
        answers = [answer_text(output, self.answer_field, type(self).__name__) for output in workflow_outputs]
        distinct = list(dict.fromkeys(answers))
        if len(distinct) == 1:
            return group_judgements([0.5] * len(answers), self.success_threshold, LlmUsage())
        orders = [order_of(len(distinct), number) for number in range(self.passes)]
        question = question_of(workflow_task, self.query_field)
        try:
            results, usage = await all_answers(
                [self._ranked(question, [distinct[index] for index in order]) for order in orders]
            )
        except NoAnswer as error:
            return shared(unscored(error), len(answers))
        last = len(distinct) - 1
        points = dict.fromkeys(distinct, 0.0)
        for order, result in zip(orders, results, strict=True):
            for rank, number in enumerate(result.ranking):
                points[distinct[order[number - 1]]] += (last - rank) / last / self.passes
        return group_judgements([points[answer] for answer in answers], self.success_threshold, usage)

    async def _ranked(self, question: str, answers: Sequence[str]) -> LlmAnswer[Ranking]:
        criteria = " ".join(self.criteria.values())
        task = f"You rank {len(answers)} answers to a question, the best first, by how well they meet this: {criteria}"
        numbers = ", ".join(map(str, range(1, len(answers) + 1)))
        form = (
            f'Answer with one JSON object: {{"reason": "one or two sentences", "ranking": [{numbers}]}}, with the '
            "numbers of all answers in your order."
        )
        texts = {"question": question} | {f"answer {i}": text or "(empty)" for i, text in enumerate(answers, 1)}

        def fault(answer: Ranking) -> str | None:
            if sorted(answer.ranking) == list(range(1, len(answers) + 1)):
                return None
            return f"ranking must contain each of the numbers {numbers} once"

        return await self.ask(fenced_prompt(task, texts, form), Ranking, fault)


def order_of(count: int, number: int) -> list[int]:
    """Return the `number`-th order of `count` answers; each odd one reverses the one before it."""
    shift = number // 2 % count
    order = [(index + shift) % count for index in range(count)]
    return order[::-1] if number % 2 else order


def shared(judgement: Judgement, count: int) -> list[Judgement]:
    """Return a judgement for each of `count` episodes, among which the group's metrics are divided."""
    metrics = {name: value / count for name, value in judgement.metrics.items()}
    return [
        Judgement(explanation=judgement.explanation, unscored_cause=judgement.unscored_cause, metrics=metrics)
    ] * count


def group_judgements(rewards: Sequence[float], success_threshold: float, usage: LlmUsage) -> list[Judgement]:
    """Return a judgement for each reward of a group."""
    metrics = {name: value / len(rewards) for name, value in usage.metrics().items()}
    return [Judgement(reward, reward >= success_threshold, metrics=metrics) for reward in rewards]
