"""Limits that the worker processes of a run share."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from astuner.config.services import JudgeLlmConfig
from astuner.errors import JudgeBudgetError
from astuner.helper_llm.usage import UsageMeter, share_limits, shared_slot


@pytest.fixture(autouse=True)
def limits(tmp_path: Path) -> Iterator[None]:
    share_limits(tmp_path)
    yield
    share_limits(None)


def test_at_most_the_configured_number_of_requests_run_at_once():
    running, most = 0, 0

    async def request() -> None:
        nonlocal running, most
        async with shared_slot(2):
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.05)
            running -= 1

    async def requests() -> None:
        await asyncio.gather(*(request() for _ in range(6)))

    asyncio.run(requests())
    assert most == 2


def test_a_killed_process_frees_its_slots():
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:

        async def hold() -> None:
            async with shared_slot(1):
                os.write(writer, b".")
                await asyncio.sleep(600)

        asyncio.run(hold())
    os.read(reader, 1)

    async def wait(seconds: float) -> None:
        async with asyncio.timeout(seconds), shared_slot(1):
            pass

    try:
        with pytest.raises(TimeoutError):
            asyncio.run(wait(0.2))
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    asyncio.run(wait(10.0))


def test_the_budget_is_that_of_all_processes():
    meters = [UsageMeter(JudgeLlmConfig(max_tokens=100, input_price=1.0)) for _ in range(2)]
    meters[0].add(meters[0].priced(60, 0))
    meters[1].check()
    meters[1].add(meters[1].priced(0, 50))
    assert [meter.total.tokens for meter in meters] == [60, 50]
    with pytest.raises(JudgeBudgetError, match="110"):
        meters[0].check()
