"""ModelTuner: exact prompts, bridged turns, limits, and malformed answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from astuner.context_tracker.audit import certificate
from astuner.context_tracker.merge import build_samples
from astuner.errors import AgentMadness, CallLimitError, ContextLengthError, WorkflowError
from astuner.model_tuner.chat_options import CallSettings
from astuner.model_tuner.codec import ChatCodec
from astuner.model_tuner.tuner import ModelTuner
from tests.scripted_engine import ScriptedEngine

TOOLS = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>'


@pytest.fixture(scope="module", params=["qwen3", "auto"])
def codec(request: pytest.FixtureRequest, tokenizer: Any) -> ChatCodec:
    """The qwen3 renderer, and the tokenizer's template with the template bridge."""
    return ChatCodec(tokenizer, request.param)


def make(codec: ChatCodec, answers: Sequence[str], **settings: Any) -> ModelTuner:
    """A tuner whose model gives `answers`, one per call."""
    left = [codec.tokenizer.encode(answer, add_special_tokens=False) for answer in answers]
    engine = ScriptedEngine(lambda prompt, params: left.pop(0), max_model_len=4096)
    defaults = {"max_model_len": 4096, "max_response_length": 4096}
    return ModelTuner(engine, codec, CallSettings(**{**defaults, **settings}), episode_id="e")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def test_a_tool_turn_extends_the_sampled_tokens(codec: ChatCodec):
    tuner = make(codec, [CALL, "3<|im_end|>"])
    first = await tuner.chat([user("1+2?")], tools=TOOLS)
    (tool,) = first.parsed.tool_calls
    assert (tool.name, tool.arguments) == ("add", {"a": 1, "b": 2})
    history = [user("1+2?"), first.call.messages[-1], {"role": "tool", "content": "3", "tool_call_id": tool.id}]
    second = await tuner.chat(history, tools=TOOLS)
    earlier_ids = first.call.prompt_ids + first.call.completion_ids
    assert second.call.prompt_ids[: len(earlier_ids)] == earlier_ids
    assert second.call.fork is None
    text = codec.tokenizer.decode(second.call.prompt_ids[len(earlier_ids) :])
    assert text == "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    (sample,) = build_samples(tuner.calls)
    assert certificate(tuner.calls, [sample]) == 1.0


async def test_sampled_ids_are_kept_although_the_text_tokenises_differently(codec: ChatCodec):
    """Each completion token is one byte; re-tokenising the text would give fewer tokens."""
    byte_ids = [codec.tokenizer.convert_tokens_to_ids(char) for char in "Whatis"]
    stop = codec.tokenizer.convert_tokens_to_ids("<|im_end|>")
    answers = [[*byte_ids, stop], [stop]]
    engine = ScriptedEngine(lambda prompt, params: answers.pop(0), max_model_len=4096)
    tuner = ModelTuner(engine, codec, CallSettings(), episode_id="e")
    first = await tuner.chat([user("hi")])
    second = await tuner.chat([user("hi"), first.call.messages[-1], user("again")])
    assert second.call.fork is None
    assert second.call.prompt_ids[: len(first.call.prompt_ids) + len(byte_ids)][-len(byte_ids) :] == tuple(byte_ids)


async def test_an_answer_is_recognised_although_the_framework_names_its_author(codec: ChatCodec):
    """The text has white space before the tool call that a rendering would change."""
    tuner = make(codec, [f"One call.\n{CALL}", "3<|im_end|>"])
    first = await tuner.chat([user("1+2?")], tools=TOOLS)
    (tool,) = first.parsed.tool_calls
    named = {**first.call.messages[-1], "name": "adder"}
    result = {"role": "tool", "content": "3", "tool_call_id": tool.id, "name": "add"}
    second = await tuner.chat([user("1+2?"), named, result], tools=TOOLS)
    assert second.call.fork is None
    assert len(build_samples(tuner.calls)) == 1


async def test_forks_name_their_cause(codec: ChatCodec):
    tuner = make(codec, [CALL, *["ok<|im_end|>"] * 3])
    first = await tuner.chat([{"role": "system", "content": "s"}, user("1+2?")], tools=TOOLS)
    answer = first.call.messages[-1]
    result = {"role": "tool", "content": "3", "tool_call_id": answer["tool_calls"][0]["id"]}
    system = {"role": "system", "content": "s"}
    changed = await tuner.chat([system, user("1+2?"), answer, result])
    edited = await tuner.chat([system, user("2+2?"), answer, result], tools=TOOLS)
    other = await tuner.chat([{"role": "system", "content": "t"}, user("1+2?"), answer, result], tools=TOOLS)
    causes = [call.call.fork and call.call.fork.cause for call in (first, changed, edited, other)]
    assert causes == [None, "tools_changed", "framework_edited_history", "system_changed"]


async def test_truncated_turn_has_no_sampled_end_token(codec: ChatCodec):
    tuner = make(codec, ["a b c d e f g h", "ok<|im_end|>"], max_tokens=3)
    first = await tuner.chat([user("hi")])
    assert (first.call.finish_reason, len(first.call.completion_ids)) == ("length", 3)
    await tuner.chat([user("hi"), first.call.messages[-1], {"role": "tool", "content": "x"}])
    trained = sum(sum(sample.train_counts) for sample in build_samples(tuner.calls))
    assert trained == 3 + len(tuner.calls[1].completion_ids)


@pytest.mark.parametrize(
    "broken", ['<tool_call>\n{"name": "add", "arguments": {"a": \n</tool_call>', "<tool_call>\nnot json"]
)
async def test_a_malformed_tool_call_reaches_the_agent_as_text(codec: ChatCodec, broken: str):
    tuner = make(codec, [f"let me see {broken}<|im_end|>"])
    answer = await tuner.chat([user("hi")], tools=TOOLS)
    assert answer.parsed.tool_calls == ()
    assert answer.parsed.content.startswith("let me see")
    assert broken.removeprefix("<tool_call>").removesuffix("</tool_call>").strip() in answer.parsed.content
    assert codec.tokenizer.decode(answer.call.completion_ids) == f"let me see {broken}<|im_end|>"


async def test_dashscope_parts_and_object_arguments_are_accepted(codec: ChatCodec):
    tuner = make(codec, [CALL, "3<|im_end|>"])
    first = await tuner.chat([user("1+2?")], tools=TOOLS)
    call = {"id": "other", "function": {"name": "add", "arguments": {"b": 2, "a": 1}}}
    again = {"role": "assistant", "content": [], "tool_calls": [call]}
    question = {"role": "user", "content": [{"text": "1+"}, {"type": "text", "text": "2?"}]}
    second = await tuner.chat([question, again, {"role": "tool", "content": [{"text": "3"}]}], tools=TOOLS)
    assert second.call.fork is None
    assert second.call.prompt_ids[: len(first.call.prompt_ids)] == first.call.prompt_ids


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "at least one"),
        (["hi"], "mapping with a role"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "image_url"),
        ([{"role": "user", "content": 3}], "text or a list of parts"),
        ([{"role": "assistant", "content": "", "tool_calls": 3}], "tool_calls must be a list"),
        ([{"role": "assistant", "content": "", "function_call": {"name": "add"}}], "write it to tool_calls"),
    ],
)
async def test_invalid_messages_are_errors(codec: ChatCodec, messages: list[Any], says: str):
    with pytest.raises(WorkflowError, match=says):
        await make(codec, ["ok"]).chat(messages)


@pytest.mark.parametrize("role", ["developer", "function"])
async def test_a_message_of_a_role_that_the_template_lacks_is_in_the_prompt(codec: ChatCodec, role: str):
    tuner = make(codec, ["3<|im_end|>", "4<|im_end|>"])
    message = {"role": role, "name": "add", "content": "Only numbers, please."}
    conversation = [message, user("1+2?")] if role == "developer" else [user("1+2?"), message]
    first = await tuner.chat(conversation)
    assert "Only numbers, please." in codec.decode(first.call.prompt_ids)
    second = await tuner.chat([*conversation, {"role": "assistant", "content": "3"}, user("1+3?")])
    assert second.call.fork is None
    ids, _ = codec.transcript([*conversation, {"role": "assistant", "content": "3"}], None)
    assert "Only numbers, please." in codec.decode(ids)


async def test_errors_name_the_exceeded_limit(codec: ChatCodec):
    with pytest.raises(ContextLengthError, match=r"data\.max_prompt_length is 5"):
        await make(codec, ["ok"], max_prompt_length=5).chat([user("hi there")])
    with pytest.raises(ContextLengthError, match=r"rollout\.max_model_len"):
        await make(codec, ["ok"], max_model_len=5).chat([user("hi there")])
    tuner = make(codec, ["ok<|im_end|>"] * 2, max_calls=1)
    await tuner.chat([user("hi")])
    with pytest.raises(CallLimitError, match=r"max_steps is 1"):
        await tuner.chat([user("hi")])


async def test_max_response_length_limits_the_episode(codec: ChatCodec):
    tuner = make(codec, ["a b c d<|im_end|>", "a b c d e f g h i j k l"], max_response_length=25)
    first = await tuner.chat([user("hi")])
    second = await tuner.chat([user("hi"), first.call.messages[-1], {"role": "tool", "content": "x"}])
    call = second.call
    assert len(call.prompt_ids) + len(call.completion_ids) <= len(first.call.prompt_ids) + 25


async def test_prompt_of_another_agent_does_not_count_as_response(codec: ChatCodec):
    tuner = make(codec, ["a<|im_end|>"] * 3, max_response_length=12, max_prompt_length=60)
    await tuner.chat([user("hi")])
    other = await tuner.chat([{"role": "system", "content": "You are the second agent."}, user("what do you say?")])
    assert len(other.call.prompt_ids) > 12
    with pytest.raises(ContextLengthError, match=r"data\.max_prompt_length is 60"):
        await tuner.chat([user("hi " * 100)])


@pytest.mark.parametrize(
    ("answer", "checklist", "degenerate"),
    [
        ("la " * 300, ["nonsense"], True),
        ("π ≤ é → √ and кириллица 中文", ["nonsense"], False),
        ("la " * 300, ["wrong_toolcall"], False),
        ("<tool_call>\nnot json\n</tool_call>", ["wrong_toolcall"], True),
        (CALL, ["nonsense", "wrong_toolcall"], False),
    ],
)
async def test_degenerate_output(codec: ChatCodec, answer: str, checklist: list[str], degenerate: bool):
    tuner = make(codec, [answer], madness_checklist=tuple(checklist), max_tokens=4000)
    if degenerate:
        with pytest.raises(AgentMadness):
            await tuner.chat([user("hi")], tools=TOOLS)
    else:
        await tuner.chat([user("hi")], tools=TOOLS)
    assert (tuner.anomaly is not None) == degenerate
    assert len(tuner.calls) == 1


async def test_agentscope_sees_text_and_tool_blocks(codec: ChatCodec):
    tuner = make(codec, [f"so\n{CALL}"])
    response = await tuner([user("1+2?")], tools=TOOLS, tool_choice=None)
    kinds = [block["type"] for block in response.content]
    assert kinds == ["text", "tool_use"]
    assert response.content[1]["input"] == {"a": 1, "b": 2}
    assert json.dumps(response.content)


async def test_tool_choice_none_gives_text(codec: ChatCodec):
    answer = await make(codec, [CALL]).chat([user("hi")], tools=TOOLS, tool_choice="none")
    assert answer.parsed.tool_calls == ()
    assert "add" in answer.parsed.content


def test_seeds_differ_between_calls_and_episodes(codec: ChatCodec):
    seeds: list[int | None] = []

    def answer(prompt: Sequence[int], params: Any) -> list[int]:
        seeds.append(params.seed)
        return [codec.stop_token_ids[0]]

    import asyncio

    run: Callable[[int], None] = lambda seed: asyncio.run(_two_calls(answer, codec, seed))  # noqa: E731
    run(1), run(2), run(1)
    assert len(set(seeds[:4])) == 4
    assert seeds[4:] == seeds[:2]


async def _two_calls(answer: Any, codec: ChatCodec, seed: int) -> None:
    tuner = ModelTuner(ScriptedEngine(answer, 4096), codec, CallSettings(), episode_id="e", seed=seed)
    await tuner.chat([user("hi")])
    await tuner.chat([user("hi")])


@pytest.mark.parametrize(
    ("role", "hint"),
    [("human", "'user'"), ("ai", "'assistant'"), ("Bot", "'assistant'"), ("x", "")],
)
def test_an_unknown_role_is_an_error(role: str, hint: str) -> None:
    from astuner.errors import WorkflowError
    from astuner.model_tuner.messages import normalise

    with pytest.raises(WorkflowError, match="expected one of system, developer, user, assistant, tool") as caught:
        normalise([{"role": "user", "content": "a"}, {"role": role, "content": "b"}])
    assert "message 1 has the role" in str(caught.value)
    assert str(caught.value).endswith(f"; write {hint}" if hint else "function")
