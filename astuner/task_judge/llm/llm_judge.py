"""The base of judges that ask an LLM, and the texts that they judge."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pydantic import BaseModel

from astuner.config.data import TaskJudgeConfig
from astuner.helper_llm.client import LlmAnswer, LlmClient, NoAnswer
from astuner.helper_llm.usage import LlmUsage
from astuner.schema import Judgement, WorkflowTask
from astuner.task_judge.judge_base import BaseJudge
from astuner.task_judge.llm.prompts import FencedPrompt

Answer = TypeVar("Answer", bound=BaseModel)
NO_ANSWER = "llm_no_answer"
"""The cause of episodes for which the LLM gave no usable answer."""
CANNOT_TELL = "llm_cannot_tell"
"""The cause of episodes that the LLM says it cannot judge."""


class LlmJudge(BaseJudge):
    """Base class for judges that ask the model `task_judge.alien_llm_model` at the endpoint in `task_judge.llm`.

    An episode for which the model gives no usable answer is unscored. Scoring raises `JudgeError` if an output has no
    answer or a task no reference that the judge needs, and `JudgeUnavailableError` if the LLM cannot be asked any more.

    Args:
        config: the section `task_judge`.
        client: the client; None to create that of the section.

    Raises:
        ConfigError: there is no key for an endpoint.
        ServiceError: the cache cannot be written.
    """

    def __init__(self, config: TaskJudgeConfig, client: LlmClient | None = None) -> None:
        super().__init__(config)
        self.client = client or LlmClient(config.llm, config.alien_llm_model, config.alien_llm_response_length)

    def close(self) -> None:
        """Close the client."""
        self.client.close()

    async def ask(
        self, prompt: FencedPrompt, answer_type: type[Answer], check: Callable[[Answer], str | None] = lambda _: None
    ) -> LlmAnswer[Answer]:
        """Ask for an answer of a type (see `LlmClient.ask`)."""
        return await self.client.ask(prompt.messages, answer_type, check, prompt.boundary)


async def all_answers(questions: list[Awaitable[LlmAnswer[Answer]]]) -> tuple[list[Answer], LlmUsage]:
    """Wait for the answers to concurrent questions, and return them with their total use.

    Raises:
        NoAnswer: a question has no answer. The error's usage is that of all questions.
    """
    results = await asyncio.gather(*questions, return_exceptions=True)
    usage = sum((result.usage for result in results if isinstance(result, LlmAnswer | NoAnswer)), LlmUsage())
    answers = []
    for result in results:
        if isinstance(result, NoAnswer):
            raise NoAnswer(str(result), usage) from None
        if isinstance(result, BaseException):
            raise result
        answers.append(result.value)
    return answers, usage


def unscored(error: NoAnswer) -> Judgement:
    """Return the judgement of an episode for which the LLM gave no usable answer."""
    return Judgement(explanation=str(error), unscored_cause=NO_ANSWER, metrics=error.usage.metrics())


def undecided(reason: str, usage: LlmUsage) -> Judgement:
    """Return the judgement of an episode that the LLM says it cannot judge."""
    explanation = f"the LLM cannot judge the answer: {reason}"
    return Judgement(explanation=explanation, unscored_cause=CANNOT_TELL, metrics=usage.metrics())


def question_of(workflow_task: WorkflowTask, field: str) -> str:
    """Return a field of the task's data row, or the task's own question if the row lacks the field."""
    value = workflow_task.task.metadata.get(field)
    return workflow_task.task.main_query if value is None else str(value)
