"""The use of an LLM that judges ask: tokens, cost, their budget, and the limits that a run's processes share."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import random
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, fields
from pathlib import Path

from astuner.config.services import JudgeLlmConfig, check_budget

_MILLION = 1_000_000
_POLL_SECONDS = 0.02

_folder: Path | None = None


@dataclass(frozen=True, slots=True)
class LlmUsage:
    """The usage of an LLM.

    Attributes:
        requests: number of HTTP requests, including failed ones.
        failed_requests: number of requests that returned no chat completion.
        reasks: number of answers that were not as requested, after which the model was asked again.
        cache_hits: number of questions that the cache answered.
        prompt_tokens, completion_tokens: token counts, as the endpoint reports them.
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
        self.total = LlmUsage()

    def priced(self, prompt_tokens: int, completion_tokens: int) -> LlmUsage:
        """Return the use of one request that was answered."""
        cost = prompt_tokens * self._config.input_price + completion_tokens * self._config.output_price
        return LlmUsage(
            requests=1, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, cost=cost / _MILLION
        )

    def add(self, usage: LlmUsage) -> LlmUsage:
        """Add a use to the total, and return it."""
        with self._lock:
            self.total += usage
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
        tokens, cost = shared_use() or (self.total.tokens, self.total.cost)
        check_budget(tokens, cost, self._config)


def share_limits(folder: Path | None) -> None:
    """Share this process's limits with the other processes that name the same folder; None for no other process."""
    global _folder  # noqa: PLW0603 it belongs to the whole process
    _folder = folder


def shared_folder() -> Path | None:
    """Return the folder of `share_limits`."""
    return _folder


@contextlib.asynccontextmanager
async def shared_slot(count: int) -> AsyncIterator[None]:
    """Hold one of `count` slots during the block, and wait for one before it. A process that ends frees its slots."""
    if _folder is None:
        yield
        return
    while (held := _free_slot(_folder, count)) is None:
        await asyncio.sleep(random.uniform(_POLL_SECONDS, 2 * _POLL_SECONDS))
    try:
        yield
    finally:
        os.close(held)


def _free_slot(folder: Path, count: int) -> int | None:
    """Lock a file of a slot, and return its descriptor; None if all are locked."""
    for number in range(count):
        descriptor = os.open(folder / f"slot-{number}", os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
        else:
            return descriptor
    return None


def shared_use(tokens: int = 0, cost: float = 0.0) -> tuple[int, float] | None:
    """Add tokens and their cost to the sums of all processes, and return the sums; None if no other process shares."""
    if _folder is None:
        return None
    descriptor = os.open(_folder / "use", os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        content = os.pread(descriptor, 1024, 0)
        earlier = json.loads(content) if content else [0, 0.0]
        sums = (int(earlier[0]) + tokens, float(earlier[1]) + cost)
        if tokens or cost:
            text = json.dumps(sums).encode()
            os.pwrite(descriptor, text, 0)
            os.ftruncate(descriptor, len(text))
    finally:
        os.close(descriptor)
    return sums
