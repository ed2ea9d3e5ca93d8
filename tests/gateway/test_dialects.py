"""One scripted episode through the APIs of the gateway, with the official clients: the record is the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import anthropic
import openai
import pytest
from anthropic import Anthropic
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI

from astuner.context_tracker.audit import certificate
from astuner.context_tracker.merge import build_samples
from astuner.errors import ModelError
from astuner.gateway import routes
from astuner.gateway.http_server import Gateway
from astuner.model_tuner.answers import ChatAnswer, as_message
from astuner.model_tuner.codec import ParsedAnswer, ToolCall
from astuner.model_tuner.http_api.dialects import DIALECTS, from_json, to_json
from astuner.model_tuner.messages import message_digest, normalise
from astuner.model_tuner.tuner import ModelTuner
from astuner.schema import Completion, LlmCall, SamplingParams
from tests.gateway.conftest import MakeTuner
from tests.scripted_engine import ScriptedEngine

SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}, "required": ["a", "b"]}
THINKING = "<think>\nTwo sums at once.\n</think>\n\n"
ANSWERS = (
    "I add both.\n"
    '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2.0}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {"b": 4,   "a": 3}}\n</tool_call><|im_end|>',
    '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 7, "note": "ü 😀"}}\n</tool_call><|im_end|>',
    "The sum is 10. \n\nEND and more",
    "ten, ten, ten, ten, ten, ten, ten<|im_end|>",
    "<|im_end|>",
    "done<|im_end|>",
)
MAX_TOKENS = 4


@dataclass
class Reply:
    """What an agent sees of an answer."""

    text: str
    calls: list[tuple[str, str, dict[str, Any]]]  # id, name, arguments
    end: str
    tokens: tuple[int, int]


@dataclass
class ChatCompletions:
    """An agent that uses `/v1/chat/completions`."""

    tuner: ModelTuner
    streamed: bool
    messages: list[Any] = field(default_factory=lambda: [{"role": "system", "content": "Be brief."}])

    def say(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def give(self, results: dict[str, str]) -> None:
        for identity, result in results.items():
            self.messages.append({"role": "tool", "tool_call_id": identity, "content": result})

    def ask(self, stop: list[str], max_tokens: int) -> Reply:
        base_url, api_key = self.tuner.as_oai_baseurl_apikey()
        options: Any = {
            "model": "astuner",
            "messages": self.messages,
            "max_tokens": max_tokens,
            "stop": stop,
            "tools": [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": SCHEMA}}],
        }
        with OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            if self.streamed:
                with client.chat.completions.stream(**options, stream_options={"include_usage": True}) as stream:
                    list(stream)
                    completion: Any = stream.current_completion_snapshot  # the final one raises for a cut answer
            else:
                completion = client.chat.completions.create(**options)
        message = completion.choices[0].message
        self.messages.append(message.to_dict())
        return Reply(
            message.content or "",
            [(one.id, one.function.name, json.loads(one.function.arguments)) for one in message.tool_calls or ()],
            completion.choices[0].finish_reason,
            (completion.usage.prompt_tokens, completion.usage.completion_tokens),
        )


@dataclass
class Responses:
    """An agent that uses `/v1/responses` and sends the whole conversation with every request."""

    tuner: ModelTuner
    streamed: bool
    items: list[Any] = field(default_factory=list)

    def say(self, text: str) -> None:
        self.items.append({"role": "user", "content": text})

    def give(self, results: dict[str, str]) -> None:
        for identity, result in results.items():
            self.items.append({"type": "function_call_output", "call_id": identity, "output": result})

    def request(self) -> dict[str, Any]:
        return {"input": self.items}

    def keep(self, response: Any) -> None:
        self.items += [item.to_dict() for item in response.output]

    def ask(self, stop: list[str], max_tokens: int) -> Reply:
        base_url, api_key = self.tuner.as_oai_baseurl_apikey()
        options: Any = {
            "model": "astuner",
            "instructions": "Be brief.",
            "max_output_tokens": max_tokens,
            "tools": [{"type": "function", "name": "add", "description": "Add.", "parameters": SCHEMA, "strict": None}],
            **self.request(),
        }
        with OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            if self.streamed:
                with client.responses.stream(**options) as stream:
                    last: Any = list(stream)[-1]
                response = last.response
            else:
                response = client.responses.create(**options)
        self.keep(response)
        calls = [item for item in response.output if item.type == "function_call"]
        ends = {"completed": "tool_calls" if calls else "stop", "incomplete": "length"}
        return Reply(
            response.output_text,
            [(item.call_id, item.name, json.loads(item.arguments)) for item in calls],
            ends[response.status],
            (response.usage.input_tokens, response.usage.output_tokens),
        )


@dataclass
class ResponsesById(Responses):
    """An agent that uses `/v1/responses` and sends only what is new."""

    last: str | None = None

    def request(self) -> dict[str, Any]:
        return {"input": self.items, "previous_response_id": self.last}

    def keep(self, response: Any) -> None:
        self.items.clear()
        self.last = response.id


@dataclass
class ResponsesByReference(Responses):
    """An agent that uses `/v1/responses` and refers to the items of the answers by their ids."""

    def keep(self, response: Any) -> None:
        self.items += [{"type": "item_reference", "id": item.id} for item in response.output]


@dataclass
class Messages:
    """An agent that uses `/v1/messages`."""

    tuner: ModelTuner
    streamed: bool
    messages: list[Any] = field(default_factory=list)

    def say(self, text: str) -> None:
        self.messages.append({"role": "user", "content": [{"type": "text", "text": text}]})

    def give(self, results: dict[str, str]) -> None:
        blocks = [{"type": "tool_result", "tool_use_id": one, "content": text} for one, text in results.items()]
        self.messages.append({"role": "user", "content": blocks})

    def ask(self, stop: list[str], max_tokens: int) -> Reply:
        endpoint = self.tuner.as_oai_baseurl_apikey()
        options: Any = {
            "model": "astuner",
            "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            "messages": self.messages,
            "max_tokens": max_tokens,
            "stop_sequences": stop,
            "tools": [{"name": "add", "description": "Add.", "input_schema": SCHEMA}],
        }
        with Anthropic(
            base_url=endpoint.anthropic_base_url, api_key=endpoint.api_key, auth_token=None, max_retries=0
        ) as client:
            counted = {name: options[name] for name in ("model", "system", "messages", "tools")}
            expected = client.messages.count_tokens(**counted).input_tokens
            if self.streamed:
                with client.messages.stream(**options) as stream:
                    message: Any = stream.get_final_message()
            else:
                message = client.messages.create(**options)
        assert message.usage.input_tokens == expected
        self.messages.append({"role": "assistant", "content": [block.to_dict() for block in message.content]})
        ends = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}
        assert message.stop_sequence == (stop[0] if message.stop_reason == "stop_sequence" else None)
        return Reply(
            "".join(block.text for block in message.content if block.type == "text"),
            [(block.id, block.name, block.input) for block in message.content if block.type == "tool_use"],
            ends[message.stop_reason],
            (message.usage.input_tokens, message.usage.output_tokens),
        )


AGENTS: tuple[Callable[[ModelTuner, bool], Any], ...] = (
    ChatCompletions,
    Responses,
    ResponsesById,
    ResponsesByReference,
    Messages,
)


def play(agent: Any, stops: bool) -> Iterator[Reply]:
    """Play the episode; the Responses API has no stop strings."""
    stop = ["END"] if stops else []
    agent.say("What is 1+2, 3+4, and the sum of both?")
    while True:
        reply = agent.ask(stop, 256)
        yield reply
        if not reply.calls:
            break
        agent.give({identity: str(sum(list(values.values())[:2])) for identity, _, values in reply.calls})
    agent.say("Say it often.")
    yield agent.ask(stop, MAX_TOKENS)
    for text in ("Say nothing.", "Stop."):
        agent.say(text)
        yield agent.ask(stop, 256)


@pytest.fixture
def record(gateway: Gateway, make_tuner: MakeTuner) -> Callable[[Any, bool, bool], Any]:
    def play_episode(agent: Any, streamed: bool, stops: bool, thinks: bool) -> Any:
        answers = [answer if stops else answer.replace("END and more", "<|im_end|>") for answer in ANSWERS]
        tuner = make_tuner([THINKING * thinks + answers[0], *answers[1:]])
        with gateway.episode(tuner):
            replies = list(play(agent(tuner, streamed), stops))
        samples = build_samples(tuner.calls)
        assert certificate(tuner.calls, samples) == 1.0
        tokens = [(call.prompt_ids, call.completion_ids, call.logprobs) for call in tuner.calls]
        assert [reply.tokens for reply in replies] == [(len(prompt), len(answer)) for prompt, answer, _ in tokens]
        seen = [(reply.text, [call[1:] for call in reply.calls], reply.end) for reply in replies]
        return tokens, [call.fork for call in tuner.calls], samples, seen

    return play_episode


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("agent", AGENTS)
def test_the_episode_is_the_same_through_every_api(record: Any, agent: Any, streamed: bool, thinks: bool):
    stops = not issubclass(agent, Responses)
    tokens, forks, samples, seen = record(agent, streamed, stops, thinks)
    expected_tokens, expected_forks, expected_samples, expected_seen = record(ChatCompletions, False, stops, thinks)
    assert seen == expected_seen
    assert tokens == expected_tokens
    assert forks == expected_forks
    assert samples == expected_samples
    assert [end for _, _, end in seen] == ["tool_calls", "tool_calls", "stop", "length", "stop", "stop"]
    # The template drops earlier thinking when a message of the user follows.
    assert [fork and fork.cause for fork in forks] == [
        None,
        None,
        None,
        "template_rewrote_history" if thinks else None,
        None,
        None,
    ]


class FailingEngine(ScriptedEngine):
    """An engine that fails after a while."""

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        await asyncio.sleep(0.3)
        raise ModelError("the engine has crashed")


@pytest.mark.parametrize("agent", [ChatCompletions, Responses, Messages])
def test_a_client_sees_an_error_within_a_stream(
    gateway: Gateway, make_tuner: MakeTuner, agent: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(routes, "_KEEP_ALIVE_SECONDS", 0.05)  # the stream starts before the error
    tuner = make_tuner(engine=FailingEngine)
    with gateway.episode(tuner):
        asker = agent(tuner, True)
        asker.say("hi")
        with pytest.raises((openai.APIError, anthropic.APIError), match="the engine has crashed"):
            asker.ask([], 9)
    assert tuner.calls == ()


TUNER: Any = SimpleNamespace(calls=())
TEXTS = st.text(st.characters(exclude_categories=()))  # with halves of surrogate pairs
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(TEXTS, values, max_size=3),
    max_leaves=5,
)
ARGUMENTS = st.dictionaries(TEXTS, VALUES, max_size=3)
CALLS = st.lists(st.builds(ToolCall, st.uuids().map(str), TEXTS, ARGUMENTS), max_size=3)


@given(TEXTS, CALLS.map(tuple), st.none() | TEXTS.filter(bool), st.sampled_from(["stop", "length"]), st.booleans())
def test_every_answer_is_recognised_when_it_is_sent_back(
    content: str, calls: Any, reasoning: str | None, end: Any, encrypted: bool
):
    parsed = ParsedAnswer(content, calls, reasoning)
    answer = ChatAnswer(parsed, LlmCall("e/0", "e", (1,), (2, 3), (-0.5, -0.5), end))
    (expected,) = normalise([as_message(parsed)])
    question = {"role": "user", "content": "?"}
    chat, _, responses, messages = DIALECTS
    for dialect, body in (
        (chat, {"messages": [question]}),
        (responses, {"input": [question], "include": ["reasoning.encrypted_content"]}),
        (messages, {"messages": [question], "max_tokens": 9}),
    ):
        request: Any = {"model": "m", **body}
        reply = from_json(to_json(dialect.body([answer], dialect.parse(request, TUNER), "m", chr)))
        if dialect is chat:
            request["messages"] += [reply["choices"][0]["message"], question]
        elif dialect is responses:
            for item in reply["output"] if encrypted else ():
                if item["type"] == "reasoning":
                    del item["content"]
            request["input"] += [*reply["output"], question]
        else:
            request["messages"] += [{"role": "assistant", "content": reply["content"]}, question]
        _, found, _ = normalise(dialect.parse(request, TUNER).messages)
        assert message_digest(found) == message_digest(expected)
        assert found.get("reasoning_content") == expected.get("reasoning_content")
