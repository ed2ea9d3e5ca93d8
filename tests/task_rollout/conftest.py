"""Fixtures of the tests of episodes that raise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.task_rollout.raising_code import kept


@pytest.fixture(params=["judge in a thread", "judge inline"])
def inline(request: pytest.FixtureRequest) -> bool:
    """Whether the judge runs in the thread of the episode, as it does for a debugger."""
    return bool(request.param == "judge inline")


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    kept.clear()
