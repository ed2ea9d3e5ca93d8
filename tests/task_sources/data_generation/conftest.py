"""A helper model that answers the questions of the pipeline from simple texts, at a real HTTP endpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from astuner.helper_llm import client as client_module
from tests.task_judge.llm.scripted_endpoint import Reply, Request

KEY = "sk-canary-4Zb81kQpXw7Lr2Tn5Vy9"
_FACT = re.compile(r"The capital of (\w+) is (\w+)\.")


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DASHSCOPE_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setattr(client_module, "_FIRST_DELAY", 0.01)


def kind(request: Request) -> str:
    if request.text.startswith("Write"):
        return "generate"
    if "Do the two answers" in request.text:
        return "compare"
    return "evaluate" if "You decide whether" in request.text else "solve"


def facts_document(countries: int, start: int = 0) -> str:
    return "\n\n".join(f"The capital of Land{n} is City{n}. It is old." for n in range(start, start + countries))


def helper_model(change: Callable[[str, Any], Any] = lambda _kind, answer: answer) -> Callable[[Request], Reply]:
    """Answer from the facts in the request; `change` may replace an answer."""

    def answer(request: Request) -> Reply:
        facts = dict(_FACT.findall(request.text))
        what = kind(request)
        result: Any
        if what == "generate":
            asked = set(re.findall(r"- What is the capital of (\w+)\?", request.text))
            count = int(request.text.split()[1])
            new = [
                {"question": f"What is the capital of {c}?", "answer": t} for c, t in facts.items() if c not in asked
            ]
            result = {"tasks": new[:count] or [{"question": "What is the capital of Land0?", "answer": "City0"}]}
        elif what == "solve":
            country = request.text.split("capital of ")[-1].split("?")[0]
            result = {"answerable": country in facts, "answer": facts.get(country, "")}
        elif what == "compare":
            result = {"same": False}
        else:
            result = {"reason": "it is", "keep": "Land1?" not in request.text}
        changed = change(what, result)
        return changed if isinstance(changed, Reply) else Reply(json.dumps(changed))

    return answer
