"""Learning of rubrics: propose, combine, test on samples, and revise.

The procedure follows Xie et al., "Auto-Rubric: learning to extract generalizable criteria for reward modeling",
arXiv:2510.17314: rubrics are proposed from samples, revised by the samples that they grade wrongly, and combined.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from filelock import FileLock
from loguru import logger
from pydantic import BaseModel, Field

from astuner.config.data import RubricsConfig, TaskJudgeConfig
from astuner.errors import JudgeError, TaskDataError, shorten
from astuner.helper_llm.cache import default_cache_folder
from astuner.helper_llm.client import LlmClient, NoAnswer
from astuner.schema import Task, TaskSet, WorkflowOutput, WorkflowTask
from astuner.task_judge.llm.prompts import fenced_prompt
from astuner.task_judge.llm.rubric_judge import RubricJudge
from astuner.task_judge.rubrics_auto_grader.grader import (
    ListwiseRubricsGrader,
    Rubrics,
    grading_client,
    make_grader,
)

_SMART_BATCH = 4
_MAX_MISTAKES = 6
"""The number of wrongly graded answers that a revision is shown."""
_MIN_SAMPLES = 2
_HELD_OUT = 4
"""One sample in this many is held out."""

_PROMPTS = {
    "en": {
        "propose": "You write criteria by which answers to questions like this one can be graded. Propose {count}. A "
        "criterion is one sentence, applies to other questions of this kind, and can be checked on an answer alone.",
        "merge": "These criteria for grading answers overlap. Merge those that mean the same, and keep all others.",
        "categorize": "Group these criteria for grading answers in categories. Keep the meaning of every criterion.",
        "refine": "These criteria graded some answers wrongly. Revise them, so that right answers score high and wrong "
        "ones low. Keep them general: do not mention these questions. The criteria:\n{rubrics}",
        "list": 'Answer with one JSON object: {"rubrics": ["first criterion", "second criterion"]}.',
        "groups": 'Answer with one JSON object: {"categories": [{"name": "a name", "rubrics": ["a criterion"]}]}.',
    },
    "zh": {
        "propose": "你编写用于给这类问题的回答评分的标准。请提出 {count} 条。每条标准是一句话，适用于其他同类问题，"
        "并且仅凭回答就可以检查。",
        "merge": "这些评分标准有重叠。请合并意思相同的标准，并保留所有其他标准。",
        "categorize": "请将这些评分标准分成若干类别，并保留每条标准的意思。",
        "refine": "这些标准对一些回答评分错误。请修改它们，使正确的回答得分高，错误的回答得分低。保持通用："
        "不要提及这些问题。标准：\n{rubrics}",
        "list": '请用一个 JSON 对象回答：{"rubrics": ["第一条标准", "第二条标准"]}。',
        "groups": '请用一个 JSON 对象回答：{"categories": [{"name": "名称", "rubrics": ["一条标准"]}]}。',
    },
}


@dataclass(frozen=True, slots=True)
class ReferenceSample:
    """A question with answers of known scores.

    Attributes:
        answers: the answers and their scores, the best one first.
    """

    question: str
    answers: tuple[tuple[str, float], ...]

    @property
    def best(self) -> str:
        """The answer with the highest score."""
        return self.answers[0][0]


class ProposedRubrics(BaseModel):
    """The LLM's answer: criteria."""

    rubrics: list[str] = Field(min_length=1)


class RubricsCategory(BaseModel):
    """A group of criteria."""

    name: str
    rubrics: list[str] = Field(min_length=1)


class RubricsCategories(BaseModel):
    """The LLM's answer: groups of criteria."""

    categories: list[RubricsCategory] = Field(min_length=1)


@dataclass(frozen=True)
class Agreement:
    """How well graded answers agree with the references.

    Attributes:
        agreed, total: numbers of comparisons.
        mistakes: descriptions of the others.
    """

    agreed: int
    total: int
    mistakes: tuple[str, ...]

    @property
    def rate(self) -> float:
        """The share of comparisons that agree."""
        return self.agreed / self.total if self.total else 0.0


def load_or_learn_rubrics(config: TaskJudgeConfig, tasks: TaskSet) -> Rubrics:
    """Return the rubrics from `rubrics_path`, or from an earlier run with the same samples and settings, or learn them.

    Raises:
        JudgeError: the grading model gave no usable answer, or cannot be asked.
        TaskDataError: the file or a sample is invalid.
    """
    settings = config.rubrics_auto_grader
    path = Path(settings.rubrics_path) if settings.rubrics_path else _cached_path(config, tasks)
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        if path.exists():
            rubrics = Rubrics.load(path)
            logger.info("{}: {} rubrics of {}", settings.grader_name, len(rubrics.rubrics), path)
            return rubrics
        client = grading_client(config)
        try:
            learner, samples = RubricsLearner(config, client), reference_samples(tasks, settings)
            # In a thread, because the caller may be called from an event loop, as in a notebook.
            with ThreadPoolExecutor(1) as thread:
                rubrics = thread.submit(asyncio.run, learner.learn(*samples)).result()
        except NoAnswer as error:
            raise JudgeError(f"no rubrics could be learned: {error}") from None
        finally:
            client.close()
        rubrics.save(path)
    logger.info(
        "{}: learned {} rubrics from {} samples; they agree with {:.0%} of {} held-out references; written to {}",
        settings.grader_name,
        len(rubrics.rubrics),
        rubrics.samples,
        rubrics.agreement or 0.0,
        rubrics.held_out,
        path,
    )
    return rubrics


def _cached_path(config: TaskJudgeConfig, tasks: TaskSet) -> Path:
    """Return the file in the cache for these samples and settings."""
    settings = config.rubrics_auto_grader
    split = [[(task.main_query, repr(task.metadata)) for task in part] for part in (tasks.training, tasks.validation)]
    content = json.dumps([settings.model_dump(mode="json"), str(config.llm.base_url), split], sort_keys=True)
    folder = Path(config.llm.cache_dir) if config.llm.cache_dir else default_cache_folder()
    name = "".join(char if char.isalnum() or char in "-_" else "_" for char in settings.grader_name)
    return folder / "rubrics" / f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:16]}.yaml"


class RubricsLearner:
    """Learns rubrics from reference samples."""

    def __init__(self, config: TaskJudgeConfig, client: LlmClient) -> None:
        self._config = config
        self._settings: RubricsConfig = config.rubrics_auto_grader
        self._client = client
        self._prompts = _PROMPTS[self._settings.language]

    async def learn(self, training: Sequence[ReferenceSample], held_out: Sequence[ReferenceSample]) -> Rubrics:
        """Return the rubrics with the best agreement on the held-out samples.

        Each epoch tests the rubrics on both parts, and revises them by the mistakes on the training samples.

        Raises:
            NoAnswer: the grading model gave no usable answer.
            JudgeUnavailableError: the grading model cannot be asked any more.
        """
        rubrics = await self._combined(await self._proposed(training))
        best, best_rate, epochs, total = rubrics, -1.0, 0, 0
        for epoch in range(self._settings.max_epochs):
            tested = await self.agreement(rubrics, held_out)
            epochs, total = epoch + 1, tested.total
            logger.info(
                "{}, epoch {}: {} rubrics, agreement {:.0%}",
                self._settings.grader_name,
                epochs,
                len(rubrics),
                tested.rate,
            )
            if tested.rate > best_rate:
                best, best_rate = rubrics, tested.rate
            mistakes = () if epochs == self._settings.max_epochs else (await self.agreement(rubrics, training)).mistakes
            if not mistakes:
                break
            criteria = "\n".join(f"- {rubric}" for rubric in rubrics)
            texts = {f"mistake {number}": text for number, text in enumerate(mistakes[:_MAX_MISTAKES], 1)}
            rubrics = await self._rubrics(self._prompts["refine"].replace("{rubrics}", criteria), texts)
        return Rubrics(
            name=self._settings.grader_name,
            grader_mode=self._settings.grader_mode,
            rubrics=tuple(best),
            agreement=best_rate,
            held_out=total,
            samples=len(training),
            epochs=epochs,
        )

    async def _proposed(self, samples: Sequence[ReferenceSample]) -> list[str]:
        """Return rubrics for the samples, without duplicates."""
        rubrics: dict[str, str] = {}
        size = _SMART_BATCH if self._settings.sampling_mode == "smart" else len(samples)
        for start in range(0, len(samples), size):
            before = len(rubrics)
            for sample in samples[start : start + size]:
                for rubric in await self._propose(sample):
                    rubrics.setdefault(" ".join(rubric.casefold().split()).strip(" ."), rubric.strip())
            if len(rubrics) == before:
                break
        return list(rubrics.values())

    async def _propose(self, sample: ReferenceSample) -> list[str]:
        count = self._settings.generate_number
        texts = {"question": sample.question, "good answer": sample.best}
        if len(sample.answers) > 1:
            texts["worse answer"] = sample.answers[-1][0]
        task = self._prompts["propose"].replace("{count}", str(count))
        return (await self._rubrics(task, texts))[:count]

    async def _rubrics(self, task: str, texts: dict[str, str]) -> list[str]:
        prompt = fenced_prompt(task, texts, self._prompts["list"], self._settings.language)

        def fault(answer: ProposedRubrics) -> str | None:
            return None if all(rubric.strip() for rubric in answer.rubrics) else "a criterion is empty"

        answer = await self._client.ask(prompt.messages, ProposedRubrics, fault, prompt.boundary)
        return answer.value.rubrics

    async def _combined(self, rubrics: list[str]) -> list[str]:
        """Combine proposed rubrics as `aggregation_mode` says."""
        mode = self._settings.aggregation_mode
        if mode == "keep_all" or len(rubrics) == 1:
            return rubrics
        texts = {"criteria": "\n".join(f"- {rubric}" for rubric in rubrics)}
        if mode == "merge_similar":
            return await self._rubrics(self._prompts["merge"], texts)
        task, form = self._prompts["categorize"], self._prompts["groups"]
        prompt = fenced_prompt(task, texts, form, self._settings.language)
        answer = await self._client.ask(prompt.messages, RubricsCategories, boundary=prompt.boundary)
        return [f"{group.name}: {' '.join(group.rubrics)}" for group in answer.value.categories]

    async def agreement(self, rubrics: Sequence[str], samples: Sequence[ReferenceSample]) -> Agreement:
        """Grade the answers of samples, and compare the results with the references.

        Pointwise, the grader agrees if answer and reference score are on the same side of `success_threshold`;
        listwise, if it ranks the better of two answers higher. An answer that the grader cannot score does not agree.
        """
        settings = self._settings
        candidate = Rubrics(name=settings.grader_name, grader_mode=settings.grader_mode, rubrics=tuple(rubrics))
        grader = make_grader(self._config, candidate, self._client)
        if isinstance(grader, ListwiseRubricsGrader):
            results = await asyncio.gather(*(self._compare(grader, sample) for sample in samples))
        else:
            results = await asyncio.gather(
                *(self._grade(grader, sample.question, *answer) for sample in samples for answer in sample.answers)
            )
        mistakes = tuple(mistake for result in results for mistake in result.mistakes)
        return Agreement(sum(r.agreed for r in results), sum(r.total for r in results), mistakes)

    async def _grade(self, grader: RubricJudge, question: str, answer: str, score: float) -> Agreement:
        judgement = await grader.judged(question, answer)
        if judgement.is_success == (score >= self._settings.success_threshold):
            return Agreement(1, 1, ())
        reward = "none" if judgement.reward is None else f"{judgement.reward:g}"
        text = f"question: {question}\nanswer: {answer}\nscore: {reward}, but it should be {score:g}"
        return Agreement(0, 1, (text,))

    async def _compare(self, grader: ListwiseRubricsGrader, sample: ReferenceSample) -> Agreement:
        task = WorkflowTask(Task("sample", sample.question), episode_id="sample")
        field = self._settings.answer_field
        outputs = [WorkflowOutput(metadata={field: text}) for text, _ in sample.answers]
        judgements = await grader.compute_group_rewards(task, outputs) if len(outputs) > 1 else []
        graded = [(*answer, judged.reward) for answer, judged in zip(sample.answers, judgements, strict=False)]
        pairs = [(one, other) for one, other in combinations(graded, 2) if one[1] > other[1]]
        wrong = [(one, other) for one, other in pairs if one[2] is None or other[2] is None or one[2] <= other[2]]
        mistakes = tuple(
            f"question: {sample.question}\nbetter answer: {one[0]}\nworse answer: {other[0]}" for one, other in wrong
        )
        return Agreement(len(pairs) - len(wrong), len(pairs), mistakes)


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
    if not training or len(training) + len(validation) < _MIN_SAMPLES:
        raise TaskDataError(
            f"rubrics_auto_grader needs at least {_MIN_SAMPLES} reference samples, and there are "
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
        value = row[config.score_field]
        value = value.item() if hasattr(value, "item") else value
        in_range = isinstance(value, int | float) and config.min_score <= value <= config.max_score
        if isinstance(value, bool) or not in_range:
            raise TaskDataError(
                f"reference sample {shorten(task.task_id)} has {config.score_field} {value!r}; expected a number from "
                f"min_score {config.min_score:g} to max_score {config.max_score:g}"
            )
        answers.setdefault(candidate, float(value))
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


def _text(row: Mapping[str, Any], field: str) -> str:
    value = row.get(field)
    return "" if value is None else str(value)
