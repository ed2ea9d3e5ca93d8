"""Tokens and cost of an LLM that judges ask, and the budget that limits them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields

from astuner.config.llm_judge import JudgeLlmConfig, check_budget
from astuner.helper_llm.shared import shared_use

_MILLION = 1_000_000


@dataclass(frozen=True, slots=True)
class LlmUsage:
    """The usage of an LLM.

    Attributes:
        requests: number of HTTP requests, including failed ones.
        failed_requests: number of requests that returned no chat completion.
        reasks: number of answers that were not as requested, after which the model was asked again.
        cache_hits: number of questions that the cache answered.
        prompt_tokens, completion_tokens: numbers of tokens, as reported by the endpoint.
        cost: price of these tokens.
    """

    requests: int = 0
    failed_requests: int = 0
    reasks: int = 0
    cache_hits: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0

    def __add__(self, other: LlmUsage) -> LlmUsage:
        return LlmUsage(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    @property
    def tokens(self) -> int:
        """Number of prompt and completion tokens together."""
        return self.prompt_tokens + self.completion_tokens

    def metrics(self) -> dict[str, float]:
        """Return the counters as metrics, such as `llm_requests`."""
        return {f"llm_{field.name}": float(getattr(self, field.name)) for field in fields(self)}


class UsageMeter:
    """Sums the use of an LLM in this process, and in those that share its limits. Thread-safe."""

    def __init__(self, config: JudgeLlmConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._total = LlmUsage()

    @property
    def total(self) -> LlmUsage:
        """The use so far."""
        return self._total

    def priced(self, prompt_tokens: int, completion_tokens: int) -> LlmUsage:
        """Return the use of one request that was answered."""
        cost = prompt_tokens * self._config.input_price + completion_tokens * self._config.output_price
        return LlmUsage(
            requests=1, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, cost=cost / _MILLION
        )

    def add(self, usage: LlmUsage) -> LlmUsage:
        """Add a use to the total, and return it."""
        with self._lock:
            self._total += usage
        if usage.tokens or usage.cost:
            shared_use(usage.tokens, usage.cost)
        return usage

    def check(self) -> None:
        """Check the budget, before a request.

        Raises:
            JudgeBudgetError: the budget is used up.
        """
        if self._config.max_tokens is None and self._config.max_cost is None:
            return
        tokens, cost = shared_use() or (self._total.tokens, self._total.cost)
        check_budget(tokens, cost, self._config)
