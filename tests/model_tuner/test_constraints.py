"""`response_format`, `tool_choice` and `parallel_tool_calls` with a real model, and in AgentScope agents."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel
from transformers import AutoModelForCausalLM

from astuner.context_tracker.audit import certificate
from astuner.context_tracker.merge import build_samples
from astuner.errors import CallLimitError, UnsupportedParameterError
from astuner.llm_engine.embedded.engine import EmbeddedEngine
from astuner.model_tuner.chat_options import CallSettings, ChatOptions
from astuner.model_tuner.codec import ChatCodec
from astuner.model_tuner.tuner import ModelTuner
from astuner.schema import Completion, SamplingParams
from tests.scripted_engine import ScriptedEngine

HI = [{"role": "user", "content": "hi"}]


def tool(name: str, *arguments: str) -> dict[str, Any]:
    properties = {argument: {"enum": [1, 2, 3]} for argument in arguments}
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(arguments),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}


TOOLS = [tool("add", "a", "b"), tool("negate", "a")]
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "verdict", "schema": {"type": "object", "properties": {"ok": {"type": "boolean"}}}},
}
STRICT = json.loads(json.dumps(FORMAT))
STRICT["json_schema"]["schema"] |= {"required": ["ok"], "additionalProperties": False}


class Verdict(BaseModel):
    ok: Literal["yes", "no"]


@pytest.fixture(scope="module", params=["qwen3", "auto"])
def codec(request: pytest.FixtureRequest, tokenizer: Any) -> ChatCodec:
    return ChatCodec(tokenizer, request.param)


@pytest.fixture(scope="module")
def engine(model_folder: Path, tokenizer: Any) -> Iterator[EmbeddedEngine]:
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    made = EmbeddedEngine(model, max_model_len=512, tokenizer=tokenizer)
    yield made
    made.close()


@pytest.fixture
def tuner(engine: EmbeddedEngine, codec: ChatCodec) -> ModelTuner:
    return ModelTuner(engine, codec, CallSettings(max_tokens=150), episode_id="e", seed=3)


def scripted(codec: ChatCodec, answer: str) -> ModelTuner:
    ids: Sequence[int] = codec.tokenizer.encode(answer, add_special_tokens=False)
    return ModelTuner(ScriptedEngine(lambda prompt, params: ids, 4096), codec, CallSettings(), episode_id="e")


async def test_an_answer_follows_the_json_schema(tuner: ModelTuner):
    for _ in range(4):
        answer = await tuner.chat(HI, response_format=STRICT)
        assert set(json.loads(answer.parsed.content)) == {"ok"}
        assert answer.call.finish_reason == "stop"
        assert answer.call.sampling.constraint is not None


async def test_an_answer_is_a_json_object(tuner: ModelTuner):
    answer = await tuner.chat(HI, response_format={"type": "json_object"}, max_tokens=150)
    assert answer.parsed.content.startswith("{")
    if answer.call.finish_reason == "stop":
        assert isinstance(json.loads(answer.parsed.content), dict)
    text = await tuner.chat(HI, response_format={"type": "text"})
    assert text.call.sampling.constraint is None


class IgnoresConstraints(ScriptedEngine):
    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        return await super().generate(prompt_ids, replace(params, constraint=None))


@pytest.mark.parametrize("demand", [{"response_format": STRICT}, {"tools": TOOLS, "tool_choice": "required"}])
async def test_answers_that_are_refused_count_but_are_not_trained(tokenizer: Any, demand: dict[str, Any]):
    ids = tokenizer.encode("No.<|im_end|>", add_special_tokens=False)
    engine = IgnoresConstraints(lambda prompt, params: ids, 4096)
    tuner = ModelTuner(engine, ChatCodec(tokenizer, "qwen3"), CallSettings(max_calls=2), episode_id="e")
    with pytest.raises(UnsupportedParameterError, match="did not enforce"):
        await tuner.chat(HI, n=2, **demand)
    assert [(call.cut, call.trained, len(call.completion_ids)) for call in tuner.calls] == [(True, False, len(ids))] * 2
    with pytest.raises(CallLimitError):
        await tuner.chat(HI)


async def test_a_required_tool_call_is_made(tuner: ModelTuner):
    named = {"type": "function", "function": {"name": "negate"}}
    for _ in range(6):
        answer = await tuner.chat(HI, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
        (call,) = answer.parsed.tool_calls
        assert set(call.arguments) == ({"a", "b"} if call.name == "add" else {"a"})
        (chosen,) = (await tuner.chat(HI, tools=TOOLS, tool_choice=named, parallel_tool_calls=False)).parsed.tool_calls
        assert chosen.name == "negate"


async def test_a_required_answer_may_have_several_calls(tuner: ModelTuner):
    counts = set()
    for _ in range(12):
        answer = await tuner.chat(HI, tools=TOOLS, tool_choice="required")
        if answer.call.finish_reason == "stop":
            counts.add(len(answer.parsed.tool_calls))
    assert counts - {0, 1}
    assert 0 not in counts


async def test_a_constrained_call_is_continued_token_exactly(tuner: ModelTuner):
    answer = await tuner.chat(HI, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    (call,) = answer.parsed.tool_calls
    result = {"role": "tool", "content": "3", "tool_call_id": call.id}
    second = await tuner.chat([*HI, answer.call.messages[-1], result], tools=TOOLS, max_tokens=5)
    assert second.call.fork is None
    earlier = answer.call.prompt_ids + answer.call.completion_ids
    assert second.call.prompt_ids[: len(earlier)] == earlier
    assert certificate(tuner.calls, build_samples(tuner.calls)) == 1.0


async def test_tools_and_a_format_allow_both(tuner: ModelTuner):
    kinds = set()
    for _ in range(10):
        answer = await tuner.chat(HI, tools=TOOLS, response_format=STRICT)
        if answer.call.finish_reason == "stop":
            kinds.add(bool(answer.parsed.tool_calls))
            assert answer.parsed.tool_calls or set(json.loads(answer.parsed.content)) == {"ok"}
    assert kinds == {True, False}


async def test_an_answer_ends_with_its_only_tool_call(codec: ChatCodec):
    one = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    tuner = scripted(codec, f"{one}\n{one}<|im_end|>")
    answer = await tuner.chat(HI, tools=TOOLS, parallel_tool_calls=False)
    (call,) = answer.parsed.tool_calls
    assert codec.decode(answer.call.completion_ids) == one
    assert answer.call.finish_reason == "stop"
    result = {"role": "tool", "content": "3", "tool_call_id": call.id}
    second = await tuner.chat([*HI, answer.call.messages[-1], result], tools=TOOLS)
    assert second.call.fork is None
    earlier = answer.call.prompt_ids + answer.call.completion_ids
    assert second.call.prompt_ids[: len(earlier)] == earlier
    assert codec.decode(second.call.prompt_ids[len(earlier) :]).startswith("<|im_end|>\n<|im_start|>user\n<tool_resp")
    both = await tuner.chat(HI, tools=TOOLS)
    assert len(both.parsed.tool_calls) == 2


async def test_opened_thinking_comes_before_the_json(engine: EmbeddedEngine, tokenizer: Any):
    codec = ChatCodec(tokenizer, "qwen3")
    tuner = ModelTuner(engine, codec, CallSettings(max_tokens=120), episode_id="e", seed=1)
    prompt_ids = (*codec.render(HI, None), *tokenizer.encode("<think>\n", add_special_tokens=False))
    constraint = tuner._forms.constraint(ChatOptions.parse({"response_format": STRICT}, None), None, prompt_ids, 120)
    assert constraint is not None
    assert constraint.json_schema is None  # servers cannot leave the thinking free
    params = SamplingParams(max_tokens=120, seed=4, stop_token_ids=codec.stop_token_ids, constraint=constraint)
    completion = await engine.generate(prompt_ids, params)
    parsed = codec.parse(completion.token_ids, prompt_ids, None)
    assert completion.finish_reason == "stop"
    assert parsed.reasoning
    assert set(json.loads(parsed.content)) == {"ok"}


@pytest.mark.parametrize(
    ("parameters", "name"),
    [
        ({"tool_choice": "required", "tools": TOOLS}, "tool_choice"),
        ({"response_format": STRICT}, "response_format"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs"),
    ],
)
async def test_an_engine_without_constraints_rejects_the_parameter_by_name(
    codec: ChatCodec, parameters: dict[str, Any], name: str
):
    with pytest.raises(UnsupportedParameterError, match=name) as caught:
        await scripted(codec, "ok").chat(HI, **parameters)
    assert caught.value.name == name


async def test_agentscope_gets_the_fields_of_its_structured_model(tuner: ModelTuner):
    response = await tuner(HI, tools=TOOLS, structured_model=Verdict)
    assert response.metadata in ({"ok": "yes"}, {"ok": "no"})
    response = await tuner(HI, TOOLS, "required")
    assert any(block["type"] == "tool_use" for block in response.content)
    response = await tuner(HI, TOOLS, "negate")
    assert {block["name"] for block in response.content if block["type"] == "tool_use"} == {"negate"}


async def test_agentscope_agents_run_where_nothing_can_be_enforced(codec: ChatCodec, log: list[str]):
    tuner = scripted(codec, "fine<|im_end|>")
    response = await tuner(HI, TOOLS, "required")
    assert response.content[0]["text"] == "fine"
    response = await tuner(HI, structured_model=Verdict)
    assert response.metadata is None
    assert len(tuner.calls) == 2
