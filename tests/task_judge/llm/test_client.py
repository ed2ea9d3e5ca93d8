"""The client of the judge's LLM against a real HTTP server: faults, keys, the cache and the budget."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from astuner.config.services import JudgeLlmConfig
from astuner.errors import ConfigError, JudgeBudgetError, JudgeUnavailableError
from astuner.helper_llm import client as client_module
from astuner.helper_llm.client import LlmAnswer, LlmClient, NoAnswer, json_object
from astuner.system.redaction.redactor import redact
from tests.task_judge.llm.scripted_endpoint import Reply, Request, ScriptedEndpoint, in_turn, scripted_endpoint

KEY_A, KEY_B, KEY_C = "sk-canary-aaaa-1111", "sk-canary-bbbb-2222", "sk-canary-cccc-3333"
GOOD = Reply('{"score": 7}')
QUESTION = [{"role": "user", "content": "Score this as JSON."}]


class Score(BaseModel):
    score: int


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASHSCOPE_API_KEY", f"{KEY_A}|{KEY_B}")
    monkeypatch.setenv("DASHSCOPE_API_KEY_BACKUP", KEY_C)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.setattr(client_module, "_FIRST_DELAY", 0.01)


@contextmanager
def serving(
    answer: Callable[[Request], Reply], folder: Path, **settings: Any
) -> Iterator[tuple[ScriptedEndpoint, LlmClient]]:
    with scripted_endpoint(answer) as endpoint:
        settings = {"cache": False, "base_url": endpoint.base_url, "cache_dir": str(folder), **settings}
        client = LlmClient(JudgeLlmConfig(**settings), "judge-model", 64)
        try:
            yield endpoint, client
        finally:
            client.close()


def ask(client: LlmClient, question: list[dict[str, str]] = QUESTION) -> LlmAnswer[Score]:
    return asyncio.run(client.ask(question, Score))


def test_the_answer_has_the_type_and_the_usage(tmp_path: Path):
    with serving(in_turn(GOOD), tmp_path, input_price=2.0, output_price=4.0) as (endpoint, client):
        answer = ask(client)
    assert answer.value == Score(score=7)
    assert (answer.usage.requests, answer.usage.prompt_tokens, answer.usage.completion_tokens) == (1, 10, 5)
    assert answer.usage.cost == pytest.approx(40e-6)
    (request,) = endpoint.requests
    assert request.body["model"] == "judge-model"
    assert request.body["max_tokens"] == 64
    assert request.body["response_format"] == {"type": "json_object"}


@pytest.mark.parametrize(
    "fault",
    [
        Reply(status=500, body=b"{}"),
        Reply(status=503, body=b"<html>busy</html>"),
        Reply(body=b"\x00garbage"),
        Reply(body=b'{"choices": []}'),
        Reply(body=b'"text"'),
        Reply(body=b"[]"),
    ],
    ids=["500", "503", "garbage", "no choice", "a string", "a list"],
)
def test_a_fault_of_the_endpoint_is_retried(fault: Reply, tmp_path: Path):
    with serving(in_turn(fault, fault, GOOD), tmp_path) as (endpoint, client):
        answer = ask(client)
    assert answer.value.score == 7
    assert (answer.usage.requests, answer.usage.failed_requests) == (3, 2)
    assert len(endpoint.requests) == 3


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (Reply(status=500, body=b'{"error": {"message": "broken"}}'), "status 500: .*broken.*after 3 attempts"),
        (Reply(body=b"garbage"), "not a chat completion.*after 3 attempts"),
        (Reply("I cannot say."), "no JSON object"),
        (Reply('{"points": 3}'), "score: Field required"),
        (Reply('{"score": "high"}'), "score: Input should be a valid integer"),
        (Reply(""), "no JSON object"),
        (Reply(status=404, body=b'{"error": {"message": "no such model"}}'), "status 404: .*no such model"),
    ],
)
def test_the_cause_is_named_if_no_attempt_succeeds(fault: Reply, cause: str, tmp_path: Path):
    with (
        serving(in_turn(fault), tmp_path, max_retries=2, max_reasks=2) as (endpoint, client),
        pytest.raises(NoAnswer, match=f"judge-model at http://127.0.0.1:.*{cause}") as error,
    ):
        ask(client)
    assert error.value.usage.requests == len(endpoint.requests) == (1 if fault.status == 404 else 3)


def test_a_wrong_answer_is_shown_to_the_model_with_its_fault(tmp_path: Path):
    with serving(in_turn(Reply('{"points": 3}'), GOOD), tmp_path) as (endpoint, client):
        answer = ask(client)
    assert answer.value.score == 7
    assert answer.usage.reasks == 1
    assert endpoint.requests[1].body["messages"][1] == {"role": "assistant", "content": '{"points": 3}'}
    assert "score: Field required" in endpoint.requests[1].text


def test_an_endpoint_that_never_answers_ends_at_the_deadline(tmp_path: Path):
    with (
        serving(in_turn(Reply(hang=True)), tmp_path, request_timeout=0.1, deadline=0.5, max_retries=100) as (_, client),
        pytest.raises(NoAnswer, match=r"no answer within task_judge.llm.deadline \(0.5 s\)"),
    ):
        ask(client)


def test_a_request_that_is_answered_too_late_is_repeated(tmp_path: Path):
    limits = {"request_timeout": 1.0, "max_retries": 100, "deadline": 600}
    with serving(in_turn(Reply(hang=True), GOOD), tmp_path, **limits) as (endpoint, client):
        assert ask(client).value.score == 7
    assert len(endpoint.requests) >= 2


def test_nothing_listens_at_the_address(tmp_path: Path):
    with socket.socket() as bound:  # the port is not free, and nothing listens on it
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}/v1"
        client = LlmClient(JudgeLlmConfig(base_url=url, cache=False, max_retries=1), "judge-model", 64)
        try:
            with pytest.raises(NoAnswer, match="no connection"):
                ask(client)
        finally:
            client.close()


def test_keys_rotate_after_rate_limits_and_the_backup_is_used_when_all_are_limited(tmp_path: Path):
    limited = {KEY_A, KEY_B}
    served: list[str] = []

    def answer(request: Request) -> Reply:
        if request.key in limited:
            return Reply(status=429, body=b"{}", headers={"retry-after": "300"})
        served.append(request.key)
        return GOOD

    with serving(answer, tmp_path) as (endpoint, client):
        assert ask(client).value.score == 7
        assert served == [KEY_C]
        assert {request.key for request in endpoint.requests} == {KEY_A, KEY_B, KEY_C}
        ask(client)
        assert len(endpoint.requests) == 4  # the limited keys rest


def test_both_keys_are_used_while_none_is_limited(tmp_path: Path):
    with serving(in_turn(GOOD), tmp_path) as (endpoint, client):
        for _ in range(4):
            ask(client)
    assert [request.key for request in endpoint.requests].count(KEY_A) == 2
    assert KEY_C not in {request.key for request in endpoint.requests}


def test_a_key_that_expires_is_not_used_again(tmp_path: Path):
    expired: set[str] = set()

    def answer(request: Request) -> Reply:
        if request.key in expired:
            return Reply(status=401, body=json.dumps({"error": {"message": f"Invalid key {request.key}"}}).encode())
        return GOOD

    with serving(answer, tmp_path) as (endpoint, client):
        ask(client)
        expired |= {KEY_A, KEY_B}
        assert ask(client).value.score == 7
        expired.add(KEY_C)
        with pytest.raises(JudgeUnavailableError, match="rejected all 3 keys in DASHSCOPE_API_KEY") as error:
            ask(client)
        before = len(endpoint.requests)
        with pytest.raises(JudgeUnavailableError):
            ask(client)
        assert len(endpoint.requests) == before
    assert "canary" not in str(error.value)


def test_an_error_that_quotes_the_key_is_redacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUDGE", "plain-canary-without-format")

    def answer(request: Request) -> Reply:
        return Reply(status=400, body=json.dumps({"error": {"message": f"bad request of {request.key}"}}).encode())

    with serving(answer, tmp_path, api_key_env="JUDGE") as (_, client), pytest.raises(NoAnswer) as error:
        ask(client)
    assert "bad request of [redacted]" in str(error.value)
    assert "canary" not in repr(client.keys)
    assert error.value.__cause__ is None
    assert error.value.__suppress_context__
    assert redact("plain-canary-without-format") == "[redacted]"


def test_the_cache_answers_a_question_that_was_asked_before(tmp_path: Path):
    with serving(in_turn(GOOD), tmp_path, cache=True) as (endpoint, client):
        ask(client)
        answer = ask(client)
        ask(client, [{"role": "user", "content": "Another question."}])
        assert len(endpoint.requests) == 2
    assert answer.value.score == 7
    assert (answer.usage.cache_hits, answer.usage.requests, answer.usage.tokens) == (1, 0, 0)
    content = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"canary" not in content
    assert b"Another question" not in content


def test_a_closed_client_can_be_used_again(tmp_path: Path):
    with serving(in_turn(GOOD), tmp_path, cache=True) as (endpoint, client):
        ask(client)
        client.close()
        assert ask(client).usage.cache_hits == 1
        assert len(endpoint.requests) == 1


def test_the_cache_is_safe_for_concurrent_clients(tmp_path: Path):
    questions = [[{"role": "user", "content": f"question {number}"}] for number in range(8)]
    with scripted_endpoint(in_turn(GOOD)) as endpoint:
        config = JudgeLlmConfig(base_url=endpoint.base_url, cache_dir=str(tmp_path))
        clients = [LlmClient(config, "judge-model", 64) for _ in range(4)]

        def ask_all(client: LlmClient) -> None:
            for question in questions:
                assert ask(client, question).value.score == 7

        threads = [threading.Thread(target=ask_all, args=(client,)) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        before = len(endpoint.requests)
        for question in questions:
            ask(clients[0], question)
        assert len(endpoint.requests) == before
        for client in clients:
            client.close()


@pytest.mark.parametrize("budget", [{"max_tokens": 30}, {"max_cost": 3e-5, "input_price": 1.0, "output_price": 1.0}])
def test_the_budget_ends_the_requests(budget: dict[str, float], tmp_path: Path):
    with serving(in_turn(GOOD), tmp_path, **budget) as (endpoint, client):
        ask(client)
        ask(client)
        with pytest.raises(JudgeBudgetError, match=r"task_judge\.llm\.max_"):
            ask(client)
        assert len(endpoint.requests) == 2


def test_concurrent_requests_are_limited(tmp_path: Path):
    slow = Reply('{"score": 7}', seconds=0.05)
    with serving(in_turn(slow), tmp_path, max_concurrent_requests=2) as (endpoint, client):

        async def ask_many() -> None:
            await asyncio.gather(*(client.ask(QUESTION, Score) for _ in range(8)))

        asyncio.run(ask_many())
    assert len(endpoint.requests) == 8
    assert endpoint.most_at_once <= 2


def test_missing_keys_are_an_error_unless_there_is_an_endpoint(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("DASHSCOPE_API_KEY")
    with pytest.raises(ConfigError, match="export DASHSCOPE_API_KEY or OPENAI_API_KEY"):
        LlmClient(JudgeLlmConfig(cache=False), "m", 1)
    with pytest.raises(ConfigError, match="names the environment variable NO_SUCH_KEY"):
        LlmClient(JudgeLlmConfig(cache=False, api_key_env="NO_SUCH_KEY"), "m", 1)
    client = LlmClient(JudgeLlmConfig(cache=False, base_url="http://127.0.0.1:1/v1"), "m", 1)
    assert client.keys.choose() == "none"
    monkeypatch.setenv("OPENAI_API_KEY", "sk-canary-openai-4444")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:2/v1")
    client = LlmClient(JudgeLlmConfig(cache=False), "m", 1)
    assert (client.keys.base_url, client.keys.variable) == ("http://127.0.0.1:2/v1", "OPENAI_API_KEY")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"score": 1}', {"score": 1}),
        ('```json\n{"score": 1}\n```', {"score": 1}),
        ('The text says {"score": 10}, but it is wrong. {"score": 2}', {"score": 2}),
        ('{"score": {"a": 1}} }', {"score": {"a": 1}}),
        ("{broken} " + '{"score": 3}', {"score": 3}),
    ],
)
def test_the_last_json_object_is_the_answer(text: str, value: object):
    assert json_object(text) == value


@pytest.mark.parametrize("text", ["", "none", "{", '{"a":' * 3000])
def test_a_text_without_an_object_is_rejected(text: str):
    with pytest.raises(ValueError, match="no JSON object"):
        json_object(text)
