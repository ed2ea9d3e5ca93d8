"""A request that extends a call gets the call's ids followed by the template's suffix, for all kinds of templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import pytest

from astuner.context_tracker.audit import certificate
from astuner.context_tracker.merge import build_samples
from astuner.errors import WorkflowError
from astuner.model_tuner.chat_options import CallSettings
from astuner.model_tuner.codec import ChatCodec
from astuner.model_tuner.tuner import ModelTuner
from astuner.schema import LlmCall
from tests.model_tuner.templates import FAMILIES, Family
from tests.scripted_engine import ScriptedEngine

TOOLS = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}]
CALLS = [{"name": "add", "arguments": {"a": 1, "b": 2}}, {"name": "add", "arguments": {"a": 3, "b": 4}}]
THOUGHT = "<think>\nadd them\n</think>\n\n"


class Agent:
    """A tuner whose model gives `answers`, and the conversation as a framework would store it."""

    def __init__(self, family: Family, base: Any, *answers: str, **settings: Any) -> None:
        self.codec = ChatCodec(family.tokenizer(base), family.renderer)
        encode = self.codec.tokenizer.encode
        left = [encode(answer, add_special_tokens=False) for answer in (*answers, *[f"ok{family.stop}"] * 3)]
        engine = ScriptedEngine(lambda prompt, params: left.pop(0), max_model_len=4096)
        self.tuner = ModelTuner(engine, self.codec, CallSettings(**settings), episode_id="e")
        self.messages: list[Mapping[str, Any]] = []

    async def ask(self, *new: Mapping[str, Any], tools: Any = None) -> LlmCall:
        self.messages.extend(new)
        answer = await self.tuner.chat(self.messages, tools=tools)
        # Many frameworks do not store the thinking.
        message = {key: value for key, value in answer.call.messages[-1].items() if key != "reasoning_content"}
        self.messages.append(message)
        return answer.call

    def suffix(self, first: LlmCall, second: LlmCall) -> str:
        """Check that the prompt of `second` extends `first` and that both are trained; return the text that it adds."""
        earlier_ids = first.prompt_ids + first.completion_ids
        assert second.fork is None
        assert second.prompt_ids[: len(earlier_ids)] == earlier_ids
        self.check()
        return self.codec.decode(second.prompt_ids[len(earlier_ids) :])

    def check(self) -> None:
        """Check that the samples reproduce every call, and train every sampled token once."""
        samples = build_samples(self.tuner.calls)
        assert certificate(self.tuner.calls, samples) == 1.0
        assert sum(sum(sample.train_counts) for sample in samples) == sum(
            len(call.completion_ids) for call in self.tuner.calls
        )

    def cause(self, call: LlmCall) -> str:
        self.check()
        assert call.fork is not None
        earlier = next(other for other in self.tuner.calls if other.call_id == call.fork.call_id)
        expected, place = earlier.prompt_ids + earlier.completion_ids, call.fork.position
        assert call.prompt_ids[:place] == expected[:place]
        assert call.prompt_ids[place : place + 1] != expected[place : place + 1]
        return call.fork.cause


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def results(*texts: str) -> list[dict[str, Any]]:
    return [
        {"role": "tool", "content": text, "tool_call_id": f"id{place}", "name": "add"}
        for place, text in enumerate(texts)
    ]


@pytest.fixture(params=FAMILIES, ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


@pytest.mark.parametrize("content", ["And now?", [{"type": "text", "text": "And "}, {"text": "now?"}]])
async def test_second_question(family: Family, tokenizer: Any, content: Any):
    agent = Agent(family, tokenizer, f"Sure{family.stop}")
    # A message before the first question: some templates do not support it.
    system = [{"role": "system", "content": "Be brief."}] if family.name != "gemma" else []
    first, second = await agent.ask(*system, user("Hi")), await agent.ask(user(content))
    assert agent.suffix(first, second) == family.between + family.asks("And now?")


@pytest.mark.parametrize("answers", [["3"], ["3", "7"]], ids=["one", "parallel"])
async def test_tool_turn(family: Family, tokenizer: Any, answers: Sequence[str]):
    agent = Agent(family, tokenizer, family.calls(CALLS[: len(answers)]) + family.stop)
    first = await agent.ask(user("Add."), tools=TOOLS)
    if family.name == "gemma":
        with pytest.raises(WorkflowError, match=r"roles user, assistant, tool.*take turns.*model\.renderer"):
            await agent.ask(*results(*answers), tools=TOOLS)
        return
    second = await agent.ask(*results(*answers), tools=TOOLS)
    assert agent.suffix(first, second) == family.between + family.results(list(answers))


async def test_truncated_turn_is_closed_by_an_untrained_token(family: Family, tokenizer: Any):
    agent = Agent(family, tokenizer, "abcdefgh", max_tokens=3)
    first = await agent.ask(user("Hi"))
    assert first.finish_reason == "length"
    second = await agent.ask(user("go on"))
    assert agent.suffix(first, second) == family.stop + family.between + family.asks("go on")


def named(name: str) -> Family:
    return next(family for family in FAMILIES if family.name == name)


@pytest.mark.parametrize(
    ("name", "at_a_question", "at_a_result"),
    [
        ("chatml", None, None),  # keeps thinking that is part of the text
        ("qwen3", "template_rewrote_history", None),
        ("qwen3-renderer", "template_rewrote_history", None),
        # these drop what precedes a tool call
        ("llama3", None, "template_rewrote_history"),
        ("llama3-renderer", None, None),
        ("mistral", None, "template_rewrote_history"),
        ("deepseek", "template_rewrote_history", "template_rewrote_history"),
        ("deepseek-renderer", None, None),  # V3's, which keeps thinking
    ],
)
async def test_thinking(name: str, at_a_question: str | None, at_a_result: str | None, tokenizer: Any):
    family = named(name)
    for answer, new, cause in [
        ("Sure", [user("And?")], at_a_question),
        (family.calls(CALLS[:1]), results("3"), at_a_result),
    ]:
        agent = Agent(family, tokenizer, THOUGHT + answer + family.stop)
        first = await agent.ask(user("Add."), tools=TOOLS if new[0]["role"] == "tool" else None)
        second = await agent.ask(*new, tools=TOOLS if new[0]["role"] == "tool" else None)
        if cause:
            assert agent.cause(second) == cause
        else:
            assert agent.suffix(first, second).startswith(family.between)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-renderer"])
async def test_thinking_dropped_by_the_framework_stays_in_the_prompt(name: str, tokenizer: Any):
    """It stays during the tool cycle, although the requests do not contain it, and is dropped at the next question."""
    family = named(name)
    agent = Agent(family, tokenizer, THOUGHT + family.calls(CALLS[:1]) + family.stop, f"Three{family.stop}")
    first = await agent.ask(user("Add."), tools=TOOLS)
    second = await agent.ask(*results("3"), tools=TOOLS)
    assert agent.suffix(first, second) == family.between + family.results(["3"])
    assert [message.get("reasoning_content", "").strip() for message in second.messages] == ["", "add them", "", ""]
    third = await agent.ask(user("And?"), tools=TOOLS)
    assert agent.cause(third) == "template_rewrote_history"
    assert third.fork is not None
    assert (third.fork.call_id, third.fork.message_index) == ("e/1", 1)
    assert "<think>" in third.fork.expected


async def test_date_in_the_template_can_change_between_calls(tokenizer: Any, monkeypatch: pytest.MonkeyPatch):
    family = named("llama3")
    agent = Agent(family, tokenizer, f"Sure{family.stop}")
    first = await agent.ask(user("Hi"))
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Tomorrow)
    assert agent.suffix(first, await agent.ask(user("And?"))) == family.asks("And?")


class Tomorrow(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return datetime(2099, 1, 2)
