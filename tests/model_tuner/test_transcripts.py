"""Supervised training trains what the model generates, and nothing that the chat template adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astuner.errors import WorkflowError
from astuner.model_tuner.codec import ChatCodec
from astuner.schema import LlmCall
from tests.examples import examples
from tests.model_tuner.templates import FAMILIES, Family

QWEN3_REAL = """{%- set last = namespace(question=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.question = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- set content = m.content.split('</think>')[-1].lstrip('\\n') %}
        {%- set thought = m.reasoning_content or '' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > last.question and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content + '<|im_end|>\\n' }}
    {%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""


def turns(before: str, between: str, after: str, prompt: str, assistant: str = "assistant") -> str:
    """A template whose turns differ in the role only."""
    return (
        "{{- bos_token or '' }}{%- for m in messages %}{%- set role = '"
        + assistant
        + "' if m.role == 'assistant' else m.role %}{{- '"
        + before
        + "' + role + '"
        + between
        + "' + m.content + '"
        + after
        + "' }}{%- endfor %}{%- if add_generation_prompt %}{{- '"
        + prompt
        + "' }}{% endif %}"
    )


def simple(name: str, stop: str, template: str, special: list[str], bos: str | None = None) -> Family:
    return Family(
        name,
        template,
        eos="<|endoftext|>" if stop != "</s>" else "</s>",
        end=stop,
        bos=bos,
        special=[mark for mark in special if mark != "</s>"],
        calls=str,
        asks=str,
        results=str,
    )


SIMPLE = [
    simple("chatml", "<|im_end|>", turns("<|im_start|>", "\\n", "<|im_end|>\\n", "<|im_start|>assistant\\n"), []),
    simple(
        "phi3",
        "<|end|>",
        turns("<|", "|>\\n", "<|end|>\\n", "<|assistant|>\\n"),
        ["<|end|>", "<|assistant|>", "<|user|>"],
    ),
    simple(
        "phi4",
        "<|im_end|>",
        turns("<|im_start|>", "<|im_sep|>", "<|im_end|>", "<|im_start|>assistant<|im_sep|>"),
        ["<|im_sep|>"],
    ),
    simple("zephyr", "</s>", turns("<|", "|>\\n", "</s>\\n", "<|assistant|>\\n"), ["</s>"]),
    simple(
        "granite",
        "<|end_of_text|>",
        turns(
            "<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>\\n", "<|start_of_role|>assistant<|end_of_role|>"
        ),
        ["<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"],
    ),
    simple(
        "command-r",
        "<|END_OF_TURN_TOKEN|>",
        turns(
            "<|START_OF_TURN_TOKEN|>",
            "|>",
            "<|END_OF_TURN_TOKEN|>",
            "<|START_OF_TURN_TOKEN|>chatbot|>",
            assistant="chatbot",
        ),
        ["<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"],
        bos="<BOS_TOKEN>",
    ),
    simple(
        "deepseek-r1",
        "<｜end▁of▁sentence｜>",
        """{{- bos_token }}{%- for m in messages %}
        {%- if m.role == 'assistant' %}
            {{- '<｜Assistant｜>' + m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}
        {%- elif m.role == 'user' %}{{- '<｜User｜>' + m.content }}{% else %}{{- m.content }}{% endif %}
        {%- endfor %}{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\\n' }}{% endif %}""",
        ["<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"],
        bos="<｜begin▁of▁sentence｜>",
    ),
    # Without a generation prompt, and with a space that the template adds around the text.
    simple(
        "llama2",
        "</s>",
        """{%- for m in messages %}
        {%- if m.role == 'assistant' %}{{- m.content + '</s>' }}
        {%- else %}{{- '[INST] ' + m.content + ' [/INST] ' }}{% endif %}{%- endfor %}""",
        ["</s>"],
    ),
    # Only the conversation's last answer has an end token.
    simple(
        "vicuna",
        "</s>",
        """{%- for m in messages %}{%- if loop.index0 > 0 %}{{- ' ' }}{% endif %}
        {%- if m.role == 'assistant' %}{{- 'ASSISTANT: ' + m.content }}
        {%- else %}{{- 'USER: ' + m.content }}{% endif %}{%- endfor %}
        {%- if add_generation_prompt %}{{- ' ASSISTANT: ' }}{% else %}{{- '</s>' }}{% endif %}""",
        ["</s>"],
    ),
]


def trained(codec: ChatCodec, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> list[str]:
    """The texts that are trained, one per answer."""
    ids, mask = codec.transcript(messages, tools)
    runs = [list(run) for value, run in groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1]) if value]
    return [codec.decode([token for token, _ in run]) for run in runs]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def called(*names: str) -> list[dict[str, Any]]:
    return [
        {"id": f"id{n}", "type": "function", "function": {"name": name, "arguments": '{"a": 1}'}}
        for n, name in enumerate(names)
    ]


@pytest.mark.parametrize("family", [*FAMILIES, *SIMPLE[:-1]], ids=lambda family: family.name)
def test_an_answer_with_weight_0_is_context(family: Family, tokenizer: Any):
    codec = ChatCodec(family.tokenizer(tokenizer), family.renderer)
    messages = [user("Hi"), assistant("Hello"), user("More"), assistant("Bye")]
    first, second = trained(codec, messages)
    for index, text in ((1, second), (3, first)):
        weighted = [*messages]
        weighted[index] = {**messages[index], "weight": 0}
        assert trained(codec, weighted) == [text]
        assert codec.transcript(weighted, None)[0] == codec.transcript(messages, None)[0]


@pytest.mark.parametrize("family", [*FAMILIES, *SIMPLE[:-1]], ids=lambda family: family.name)
def test_text_and_end_token_of_every_answer_are_trained(family: Family, tokenizer: Any):
    codec = ChatCodec(family.tokenizer(tokenizer), family.renderer)
    messages = [
        user("Hi"),
        assistant("Sure.\n\nWhat now"),
        user("Hi"),
        assistant("Sure."),
        user("Sure."),
        assistant("ok"),
    ]
    assert trained(codec, messages) == [f"Sure.\n\nWhat now{family.stop}", f"Sure.{family.stop}", f"ok{family.stop}"]


def test_an_answer_without_an_end_token_ends_with_its_text(tokenizer: Any):
    codec = ChatCodec(SIMPLE[-1].tokenizer(tokenizer))
    messages = [user("Hi"), assistant("Sure now"), user("Hi"), assistant("ok")]
    assert [text.strip() for text in trained(codec, messages)] == ["Sure now", "ok</s>"]


def test_an_answer_that_ends_the_conversation_is_trained(tokenizer: Any):
    """The template writes the end token of an answer only if another message follows."""
    template = turns("<|im_start|>", "\\n", "", "<|im_start|>assistant\\n").replace(
        "{%- endfor %}", "{%- if not (loop.last and m.role == 'assistant') %}{{- '</s>' }}{% endif %}{%- endfor %}"
    )
    codec = ChatCodec(simple("last", "</s>", template, []).tokenizer(tokenizer))
    assert trained(codec, [user("Hi"), assistant("Sure")]) == ["Sure"]
    several = [user("Hi"), assistant("Sure"), user("Hi"), assistant("ok")]
    assert trained(codec, several) == ["Sure</s>", "ok"]


@settings(max_examples=examples(15))
@given(st.lists(st.text("ab cé.\n", min_size=1, max_size=12).map(lambda text: f"x{text}x"), min_size=1, max_size=3))
@pytest.mark.parametrize("family", [FAMILIES[0], FAMILIES[3], *SIMPLE[:7]], ids=lambda family: family.name)
def test_any_text_is_trained_as_it_stands(family: Family, tokenizer: Any, texts: list[str]):
    codec = ChatCodec(family.tokenizer(tokenizer), family.renderer)
    messages = [message for text in texts for message in (user(text), assistant(text))]
    assert trained(codec, messages) == [text + family.stop for text in texts]


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.name not in ("gemma",)], ids=lambda family: family.name)
def test_tool_calls_are_trained_and_results_are_not(family: Family, tokenizer: Any):
    codec = ChatCodec(family.tokenizer(tokenizer), family.renderer)
    result = {"role": "tool", "content": "TOOLRESULT", "tool_call_id": "id0", "name": "add"}
    messages = [user("Add"), assistant("", tool_calls=called("add")), result, assistant("It is 3")]
    calls, answer = trained(codec, messages)
    assert answer == f"It is 3{family.stop}"
    assert calls == family.calls([{"name": "add", "arguments": {"a": 1}}]) + family.stop


def test_empty_thinking_is_not_trained_and_thinking_is(tokenizer: Any):
    family = simple("qwen3", "<|im_end|>", QWEN3_REAL, [])
    for renderer in ("default", "qwen3"):
        codec = ChatCodec(family.tokenizer(tokenizer), renderer)
        plain = [user("Hi"), assistant("Sure"), user("Again"), assistant("ok")]
        assert "<think>\n\n</think>\n\nok" in codec.decode(codec._render(plain, None, prompt=False))
        assert trained(codec, plain) == ["Sure<|im_end|>", "ok<|im_end|>"]
        thinking = [user("Hi"), assistant("ok", reasoning_content="add them")]
        assert trained(codec, thinking) == ["<think>\nadd them\n</think>\n\nok<|im_end|>"]


def test_the_trained_tokens_are_those_after_the_prompt(tokenizer: Any):
    """A transcript of one question is the prompt of that question followed by what is trained."""
    for family in SIMPLE[:6]:
        codec = ChatCodec(family.tokenizer(tokenizer), family.renderer)
        prompt = codec.render([user("Hi")], None)
        ids, mask = codec.transcript([user("Hi"), assistant("Sure")], None)
        assert tuple(ids[: len(prompt)]) == prompt
        assert mask[: len(prompt)] == (False,) * len(prompt)
        assert mask[len(prompt)]


def test_a_template_that_rejects_the_transcript_is_an_error(tokenizer: Any):
    codec = ChatCodec(FAMILIES[5].tokenizer(tokenizer))
    with pytest.raises(WorkflowError, match=r"rejects the messages.*there is no system role"):
        codec.transcript([{"role": "system", "content": "x"}, user("Hi"), assistant("Sure")], None)


def test_an_answer_starts_with_a_new_token(tokenizer: Any):
    """The tokens of a transcript are the tokens of the prompts and those of the answers, as in a rollout."""
    codec = ChatCodec(tokenizer, "default")
    answers = ["\\boxed{5}", "I compute 2+3 in Python."]
    prompt = "<|im_start|>assistant\n"
    # Tokenised as one text, a token crosses the border.
    assert codec._encode(prompt + answers[0]) != codec._encode(prompt) + codec._encode(answers[0])
    messages = [user("2+3?"), assistant(answers[0]), user("How?"), assistant(answers[1])]
    ids, generated = codec.transcript(messages, None)
    first = codec.render(messages[:1], None)
    sampled = tuple(codec._encode(answers[0] + "<|im_end|>"))
    second = codec.bridge(
        LlmCall("e/0", "e", first, sampled, (0.0,) * len(sampled), "stop", messages=tuple(messages[:2])),
        messages[:3],
        2,
        None,
    )
    assert second is not None
    again = tuple(codec._encode(answers[1] + "<|im_end|>"))
    assert ids == second + again + tuple(codec._encode("\n"))
    assert trained(codec, messages) == [answer + "<|im_end|>" for answer in answers]
    assert generated[: len(second)] == (False,) * len(first) + (True,) * len(sampled) + (False,) * (
        len(second) - len(first) - len(sampled)
    )
