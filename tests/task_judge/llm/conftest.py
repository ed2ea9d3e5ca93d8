from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from astuner.config.data import TaskJudgeConfig
from astuner.helper_llm import client as client_module
from astuner.task_judge.llm.llm_judge import LlmJudge
from tests.task_judge.llm.scripted_endpoint import Reply, Request, ScriptedEndpoint

Judge = TypeVar("Judge", bound=LlmJudge)
MakeJudge = Callable[..., Any]


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DASHSCOPE_API_KEY", "DASHSCOPE_API_KEY_BACKUP", "OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(client_module, "_FIRST_DELAY", 0.01)


@pytest.fixture
def make_judge(tmp_path: Path) -> Iterator[MakeJudge]:
    """Return a function that makes a judge and the endpoint that it asks."""
    closing: list[Any] = []

    def make(
        judge_class: type[Judge], answer: Callable[[Request], Reply], llm: dict[str, Any] | None = None, **params: Any
    ) -> tuple[Judge, ScriptedEndpoint]:
        endpoint = ScriptedEndpoint(answer)
        closing.append(endpoint)
        settings = {
            "base_url": endpoint.base_url,
            "cache_dir": str(tmp_path / "cache"),
            "max_retries": 1,
            **(llm or {}),
        }
        judge = judge_class(TaskJudgeConfig.model_validate({"llm": settings}), **params)
        closing.append(judge)
        return judge, endpoint

    yield make
    for each in reversed(closing):
        each.close()
