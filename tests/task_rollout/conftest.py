"""Fixtures of the tests of episodes that raise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.task_rollout.raising_code import kept


@pytest.fixture(params=["threads", "main thread"])
def in_main_thread(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "main thread")


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    kept.clear()
