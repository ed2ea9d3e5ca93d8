"""A client of an OpenAI-compatible endpoint that asks for structured answers, for judges."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from astuner.config.services import JudgeLlmConfig
from astuner.errors import AstunerError, field_problems, first_line, shorten
from astuner.helper_llm.cache import AnswerCache, default_cache_folder, question_hash
from astuner.helper_llm.keys import ApiKeys
from astuner.helper_llm.usage import LlmUsage, UsageMeter, shared_slot
from astuner.system.loop_thread import LoopThread
from astuner.system.redaction.redactor import redact

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.chat import ChatCompletion

Answer = TypeVar("Answer", bound=BaseModel)
Result = TypeVar("Result")
ChatMessage = Mapping[str, str]

_FIRST_DELAY = 0.5
_MAX_DELAY = 20.0
_RATE_LIMIT_SECONDS = 10.0
"""Pause of a rate-limited key in seconds, if the endpoint does not specify one."""
_RATE_LIMITED = 429
_UNAUTHORIZED = (401, 403)
_RETRIED = (408, 409, 425)


class NoAnswer(AstunerError):
    """An LLM gave no usable answer within the configured limits.

    Attributes:
        usage: the use of all attempts.
    """

    def __init__(self, message: str, usage: LlmUsage) -> None:
        super().__init__(message)
        self.usage = usage


@dataclass(frozen=True)
class LlmAnswer(Generic[Answer]):
    """A validated answer.

    Attributes:
        usage: the tokens and the cost of the answer.
    """

    value: Answer
    usage: LlmUsage


class _Retry(Exception):
    """A request failed and may be repeated after at least `seconds`; `next_key`: at once with another key."""

    def __init__(self, cause: str, seconds: float = 0.0, *, next_key: bool = False) -> None:
        super().__init__(cause)
        self.seconds = seconds
        self.next_key = next_key


class LlmClient:
    """Asks an LLM for JSON answers. Serves any number of event loops and threads.

    Requests run on an event loop in the client's own thread, so that they share connections, the limit on concurrent
    requests and all episodes' deadlines.

    Args:
        config: the endpoint and the limits.
        model: the name of the model at the endpoint.
        max_answer_tokens: maximum number of tokens in an answer.

    Raises:
        ConfigError: no key is set.
        ServiceError: the cache cannot be written.
    """

    def __init__(self, config: JudgeLlmConfig, model: str, max_answer_tokens: int) -> None:
        self.config = config
        self.model = model
        self.meter = UsageMeter(config)
        self._max_answer_tokens = max_answer_tokens
        self.keys = ApiKeys.from_environment(config)
        self._cache = self._opened_cache()
        self._lock = threading.Lock()
        self._loop: LoopThread | None = None
        self._openai: AsyncOpenAI | None = None
        self._slots: asyncio.Semaphore | None = None

    async def ask(
        self,
        messages: Sequence[ChatMessage],
        answer_type: type[Answer],
        check: Callable[[Answer], str | None] = lambda _: None,
        boundary: str = "",
    ) -> LlmAnswer[Answer]:
        """Ask for an answer of type `answer_type`.

        Args:
            messages: the chat messages; they say that the answer is a JSON object, and describe it.
            check: returns the problem of an answer that has the right schema, or None.
            boundary: a random text in the messages, which the cache ignores.

        Raises:
            NoAnswer: the endpoint, or the model, gave no such answer before the deadline or within the retries.
            JudgeUnavailableError: the endpoint has rejected all keys.
            JudgeBudgetError: the budget is used up.
        """
        return await asyncio.wrap_future(self._start().submit(self._ask(messages, answer_type, check, boundary)))

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine that asks on the client's event loop, and return its result; blocks."""
        return self._start().submit(coroutine).result()

    def close(self) -> None:
        """Close the connections, the cache and the thread; `ask` opens them again. Requests are cancelled."""
        with self._lock:
            loop, openai, self._loop = self._loop, self._openai, None
            cache, self._cache = self._cache, None
        if loop is not None:
            loop.submit(self._shut_down(openai)).result()
            loop.close()
        if cache is not None:
            cache.close()

    def _opened_cache(self) -> AnswerCache | None:
        folder = Path(self.config.cache_dir) if self.config.cache_dir else default_cache_folder()
        return AnswerCache(folder) if self.config.cache else None

    @staticmethod
    async def _shut_down(openai: AsyncOpenAI | None) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if openai is not None:
            await openai.close()

    def _start(self) -> LoopThread:
        """Return the client's event loop; start its thread at the first call."""
        with self._lock:
            if self._loop is None:
                from openai import AsyncOpenAI

                self._openai = AsyncOpenAI(
                    base_url=self.keys.base_url,
                    api_key="none",  # replaced in each request
                    max_retries=0,
                    timeout=self.config.request_timeout,
                )
                self._cache = self._cache or self._opened_cache()
                self._slots = asyncio.Semaphore(self.config.max_concurrent_requests)
                self._loop = LoopThread("judge LLM")
            return self._loop

    async def _ask(
        self,
        messages: Sequence[ChatMessage],
        answer_type: type[Answer],
        check: Callable[[Answer], str | None],
        boundary: str,
    ) -> LlmAnswer[Answer]:
        parameters = self._parameters(answer_type)
        texts = [(m["role"], m["content"].replace(boundary, "") if boundary else m["content"]) for m in messages]
        question = question_hash({"url": self.keys.base_url, "messages": texts, **parameters})
        cached = None if self._cache is None else self._cache.get(question)
        if cached is not None:
            return LlmAnswer(answer_type.model_validate_json(cached), self.meter.add(LlmUsage(cache_hits=1)))
        attempt = _Question(self, parameters)
        try:
            async with asyncio.timeout(self.config.deadline):
                value = await attempt.answered(messages, answer_type, check)
        except TimeoutError:
            seconds = f"no answer within task_judge.llm.deadline ({self.config.deadline:g} s)"
            raise NoAnswer("; ".join(filter(None, (seconds, attempt.last_cause))), attempt.usage) from None
        # What the model quotes from the judged text may contain a secret.
        if self._cache is not None and redact(text := value.model_dump_json()) == text:
            self._cache.put(question, text)
        return LlmAnswer(value, attempt.usage)

    def _parameters(self, answer_type: type[BaseModel]) -> dict[str, Any]:
        parameters: dict[str, Any] = {
            "model": self.model,
            "max_tokens": self._max_answer_tokens,
            "temperature": self.config.temperature,
        }
        if self.config.response_format == "json_object":
            parameters["response_format"] = {"type": "json_object"}
        elif self.config.response_format == "json_schema":
            schema = {"name": answer_type.__name__, "schema": answer_type.model_json_schema()}
            parameters["response_format"] = {"type": "json_schema", "json_schema": schema}
        return parameters

    async def request(self, messages: Sequence[ChatMessage], parameters: Mapping[str, Any], key: str) -> ChatCompletion:
        """Send one request with a key, when fewer than the maximum of concurrent requests are in progress."""
        assert self._openai is not None
        assert self._slots is not None
        limit = self.config.max_concurrent_requests
        async with self._slots, shared_slot(limit), asyncio.timeout(self.config.request_timeout):
            self.meter.check()  # checked again, because many questions may have waited for a slot
            client = self._openai.with_options(api_key=key)
            return await client.chat.completions.create(messages=[dict(m) for m in messages], **parameters)  # type: ignore[misc]


class _Question:
    """A question to an LLM, with its retries.

    Attributes:
        usage: the use of all requests so far.
        last_cause: the error of the last failed request or answer; "" if none failed.
    """

    def __init__(self, client: LlmClient, parameters: Mapping[str, Any]) -> None:
        self._client = client
        self._parameters = parameters
        self.usage = LlmUsage()
        self.last_cause = ""

    async def answered(
        self, messages: Sequence[ChatMessage], answer_type: type[Answer], check: Callable[[Answer], str | None]
    ) -> Answer:
        """Ask until an answer has the type. The model sees each wrong answer with its error.

        Raises:
            NoAnswer: no answer has the type after the retries.
        """
        conversation = list(messages)
        for attempt in range(self._client.config.max_reasks + 1):
            if attempt:
                self._count(LlmUsage(reasks=1))
            text = await self._completion(conversation)
            try:
                value = answer_type.model_validate(json_object(text))
                fault = check(value)
            except ValidationError as error:
                fault = "; ".join(field_problems(error, "the object")[:3])
            except ValueError as error:
                fault = str(error)
            if fault is None:
                return value
            self.last_cause = f"{self._where} answered {shorten(text)!r}, which is not as requested: {fault}"
            conversation = [
                *messages,
                {"role": "assistant", "content": text},
                {
                    "role": "user",
                    "content": f"This answer cannot be used: {fault}. Answer again, with nothing but the JSON object.",
                },
            ]
        raise NoAnswer(redact(self.last_cause), self.usage)

    @property
    def _where(self) -> str:
        return f"{self._client.model} at {self._client.keys.base_url}"

    def _count(self, usage: LlmUsage) -> None:
        self.usage += self._client.meter.add(usage)

    async def _completion(self, messages: Sequence[ChatMessage]) -> str:
        """Return the text of one answer, after retries with exponentially growing delays and full jitter."""
        retries, keys, delay = 0, self._client.keys, _FIRST_DELAY
        while True:
            self._client.meter.check()
            key = keys.choose()
            try:
                return await self._text(messages, key)
            except _Retry as failure:
                self.last_cause = redact(f"{self._where}: {failure}")
                self._count(LlmUsage(requests=1, failed_requests=1))
                if failure.next_key and not keys.seconds_until_ready():
                    continue
                if retries == self._client.config.max_retries:
                    raise NoAnswer(f"{self.last_cause} (after {retries + 1} attempts)", self.usage) from None
                retries += 1
                wait = max(failure.seconds, keys.seconds_until_ready() if failure.next_key else 0.0)
                await asyncio.sleep(wait + random.uniform(0, delay))
                delay = min(2 * delay, _MAX_DELAY)

    async def _text(self, messages: Sequence[ChatMessage], key: str) -> str:
        from openai import APIConnectionError, APIStatusError, OpenAIError

        try:
            completion = await self._client.request(messages, self._parameters, key)
        except APIStatusError as error:
            raise self._failure(error, key) from None
        except TimeoutError:
            seconds = self._client.config.request_timeout
            raise _Retry(f"no answer within task_judge.llm.request_timeout ({seconds:g} s)") from None
        except APIConnectionError as error:
            raise _Retry(f"no connection: {first_line(error.__cause__ or error)}") from None
        # A server of another kind can answer anything, which the client cannot parse.
        except (OpenAIError, ValueError, TypeError, AttributeError) as error:
            raise _Retry(f"an answer that is not a chat completion ({first_line(error)})") from None
        try:
            text, usage = completion.choices[0].message.content, completion.usage
            tokens = (usage.prompt_tokens, usage.completion_tokens) if usage else (0, 0)
        except (AttributeError, LookupError, TypeError):
            raise _Retry(f"an answer that is not a chat completion: {shorten(str(completion))}") from None
        self._count(self._client.meter.priced(*tokens))
        return text or ""

    def _failure(self, error: Any, key: str) -> Exception:
        """Return the exception to raise for an HTTP status other than 200."""
        status, keys = error.status_code, self._client.keys
        cause = f"status {status}: {shorten(first_line(error))}"
        if status in _UNAUTHORIZED:
            keys.reject(key)
            return _Retry(cause, next_key=True)
        if status == _RATE_LIMITED:
            keys.rest(key, max(_retry_after(error, _RATE_LIMIT_SECONDS), _FIRST_DELAY))
            return _Retry(cause, next_key=True)
        if status in _RETRIED or status >= 500:
            return _Retry(cause, _retry_after(error, 0.0))
        self._count(LlmUsage(requests=1, failed_requests=1))
        return NoAnswer(redact(f"{self._where}: {cause}"), self.usage)


def _retry_after(error: Any, default: float) -> float:
    """Return the seconds of the header Retry-After, within bounds."""
    try:
        return min(max(float(error.response.headers["retry-after"]), 0.0), 600.0)
    except (KeyError, ValueError):
        return default


def json_object(text: str) -> object:
    """Return the last JSON object in a text, which may contain prose around it.

    A model that explains itself may quote an object of the judged text first.

    Raises:
        ValueError: the text contains no JSON object.
    """
    decoder = json.JSONDecoder()
    objects: list[object] = []
    start = text.find("{")
    while start >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
            objects.append(value)
        except (ValueError, RecursionError):
            end = start + 1
        start = text.find("{", end)
    if not objects:
        raise ValueError("it contains no JSON object")
    return objects[-1]
