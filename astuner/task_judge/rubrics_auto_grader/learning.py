"""Learning of rubrics: propose, combine, test on samples, and revise.

The procedure follows Xie et al., "Auto-Rubric: learning to extract generalizable criteria for reward modeling",
arXiv:2510.17314: rubrics are proposed from samples, revised by the samples that they grade wrongly, and combined.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock
from loguru import logger
from pydantic import BaseModel, Field

from astuner.errors import JudgeError
from astuner.helper_llm.cache import default_cache_folder
from astuner.helper_llm.client import LlmClient, NoAnswer
from astuner.schema import Task, TaskSet, WorkflowOutput, WorkflowTask
from astuner.task_judge.llm.prompts import fenced_prompt
from astuner.task_judge.llm.rubric_judge import RubricJudge
from astuner.task_judge.rubrics_auto_grader.grader import ListwiseRubricsGrader, grading_client, make_grader
from astuner.task_judge.rubrics_auto_grader.rubrics import Rubrics
from astuner.task_judge.rubrics_auto_grader.samples import ReferenceSample, reference_samples

if TYPE_CHECKING:
    from astuner.config.data import RubricsConfig, TaskJudgeConfig

_SMART_BATCH = 4
_MAX_MISTAKES = 6
"""The number of wrongly graded answers that a revision is shown."""

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


class ProposedRubrics(BaseModel):
    """The answer of the LLM: criteria."""

    rubrics: list[str] = Field(min_length=1)


class RubricsCategory(BaseModel):
    """A group of criteria."""

    name: str
    rubrics: list[str] = Field(min_length=1)


class RubricsCategories(BaseModel):
    """The answer of the LLM: groups of criteria."""

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
            rubrics = _run(learner.learn(*samples))
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


def _run(learning: Coroutine[object, object, Rubrics]) -> Rubrics:
    """Run a coroutine in a thread: the caller may be called from an event loop, as in a notebook."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, learning).result()


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
            rubrics = await self._refined(rubrics, mistakes[:_MAX_MISTAKES])
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
        answer = await self._client.ask(prompt.messages, ProposedRubrics, _no_empty_text, prompt.boundary)
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

    async def _refined(self, rubrics: Sequence[str], mistakes: Sequence[str]) -> list[str]:
        task = self._prompts["refine"].replace("{rubrics}", "\n".join(f"- {rubric}" for rubric in rubrics))
        return await self._rubrics(task, {f"mistake {number}": text for number, text in enumerate(mistakes, 1)})

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
        """Score an answer."""
        judgement = await grader.judged(question, answer)
        if judgement.is_success == (score >= self._settings.success_threshold):
            return Agreement(1, 1, ())
        reward = "none" if judgement.reward is None else f"{judgement.reward:g}"
        text = f"question: {question}\nanswer: {answer}\nscore: {reward}, but it should be {score:g}"
        return Agreement(0, 1, (text,))

    async def _compare(self, grader: ListwiseRubricsGrader, sample: ReferenceSample) -> Agreement:
        """Rank the answers of a sample."""
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


def _no_empty_text(answer: ProposedRubrics) -> str | None:
    return None if all(rubric.strip() for rubric in answer.rubrics) else "a criterion is empty"
