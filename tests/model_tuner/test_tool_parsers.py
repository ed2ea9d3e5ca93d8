"""Tool calls in the formats of model families are parsed with the renderer `default`, chosen by the chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from astuner.errors import ConfigError
from astuner.model_tuner.codec import ChatCodec, ParsedAnswer
from tests.model_tuner.templates import CHATML
from tests.model_tuner.test_continuation import Agent, results, user
from tests.model_tuner.tool_formats import FORMATS, HERMES, ONE, TWO, Format


def tool(name: str, **properties: str) -> dict[str, Any]:
    declared = {key: {"type": kind} for key, kind in properties.items()}
    parameters = {"type": "object", "properties": declared}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


TOOLS = [tool("get-weather", city="string", days="integer"), tool("add", a="integer", b="number")]
IDS = [f"{number}-{known.parser}" for number, known in enumerate(FORMATS)]
GPT_OSS = (
    "{{- '<|start|>system<|message|># Valid channels: analysis, commentary, final.<|end|>' }}"
    "{%- for m in messages %}{%- if m.role == 'assistant' %}{{- '<|start|>assistant<|channel|>final<|message|>' }}"
    "{{- m.content + ('<|return|>' if loop.last and not add_generation_prompt else '<|end|>') }}"
    "{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"
)


def parse(codec: ChatCodec, answer: str, tools: Any = TOOLS, stop: str = "<|end_of_answer|>") -> ParsedAnswer:
    prompt = codec.render([user("Weather?")], tools)
    return codec.parse(codec.tokenizer.encode(answer + stop, add_special_tokens=False), prompt, tools)


def calls(parsed: ParsedAnswer) -> list[tuple[str, Any]]:
    # The name that is not an identifier in Python is another one in the Python format.
    return [(call.name.replace("get_", "get-"), dict(call.arguments)) for call in parsed.tool_calls]


@pytest.fixture(params=FORMATS, ids=IDS)
def known(request: pytest.FixtureRequest) -> Format:
    return request.param


def test_the_parser_is_chosen_by_the_template(known: Format, tokenizer: Any):
    for name in ("auto", "default"):
        codec = ChatCodec(known.tokenizer(tokenizer), name)
        assert (codec.renderer_name, codec.reads_tool_calls) == ("default", True)
        assert codec._renderer.config.tool_parser == known.parser


def test_one_call_and_several(known: Format, tokenizer: Any):
    codec = ChatCodec(known.tokenizer(tokenizer))
    one = parse(codec, known.one)
    assert (calls(one), one.content.strip(), one.malformed) == (ONE, known.text.strip(), ())
    if known.two:
        several = parse(codec, known.two)
        assert (calls(several), several.content.strip(), several.malformed) == (TWO, "", ())
        assert len({call.id for call in several.tool_calls}) == 2


def test_a_function_with_json_arguments(tokenizer: Any):
    """The template of the XML format and those that write JSON into the element have the same delimiter."""
    family = next(known for known in FORMATS if known.parser == "qwen3.5")
    codec = ChatCodec(family.tokenizer(tokenizer))
    parsed = parse(codec, '<function=get-weather>{"city": "Paris", "days": 3}</function>')
    assert (calls(parsed), parsed.malformed) == (ONE, ())
    for broken in (
        "<function=add>{'a': 1}</function>",
        "<function=add>a=1, b=2</function>",
        "<function=add>[1]</function>",
    ):
        parsed = parse(codec, broken)
        assert (parsed.tool_calls, parsed.malformed) == ((), (broken,))
    assert calls(parse(codec, "<function=add>\n</function>")) == [("add", {})]


def test_a_malformed_call_is_text(known: Format, tokenizer: Any):
    parsed = parse(ChatCodec(known.tokenizer(tokenizer)), known.broken)
    assert parsed.tool_calls == ()
    assert parsed.malformed == (known.broken,)
    assert parsed.content.strip() == known.broken.strip()


def test_a_call_that_was_cut_off_is_text(known: Format, tokenizer: Any):
    codec = ChatCodec(known.tokenizer(tokenizer))
    cut = known.one[: known.one.index("Paris") + 3]
    parsed = parse(codec, cut, stop="")
    assert parsed.tool_calls == ()
    assert parsed.malformed == (cut.removeprefix(known.text).strip(),)


def test_calls_without_tools_are_text(known: Format, tokenizer: Any):
    parsed = parse(ChatCodec(known.tokenizer(tokenizer)), known.two or known.one, tools=None)
    assert parsed.tool_calls == ()
    assert "".join(parsed.content.split()) == "".join((known.two or known.one).split())


def test_plain_text_is_text(known: Format, tokenizer: Any):
    codec = ChatCodec(known.tokenizer(tokenizer))
    for text in ("It is 3 degrees in Paris.", '{"city": "Paris"}', "a [b](c) <d> {e}"):
        assert parse(codec, text) == ParsedAnswer(text)


@pytest.mark.parametrize(
    ("parser", "call", "expected"),
    [
        (
            "qwen3.5",
            "<tool_call>\n<function=f>\n<parameter=s>\n{}\n</parameter>\n</function>\n</tool_call>",
            {"s": "{}"},
        ),
        ("qwen3.5", "<tool_call>\n<function=f>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>", {"n": 3}),
        ("glm", "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>007</arg_value>\n</tool_call>", {"s": "007"}),
        ("glm", "<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>three</arg_value>\n</tool_call>", {"n": "three"}),
        ("glm", "<tool_call>f\n</tool_call>", {}),
        ("qwen3", '<tool_call>\n{"name": "f", "arguments": {"n": "3"}}\n</tool_call>', {"n": "3"}),
    ],
)
def test_arguments_have_the_types_of_the_schema(parser: str, call: str, expected: Any, tokenizer: Any):
    known = next(known for known in FORMATS if known.parser == parser)
    parsed = parse(ChatCodec(known.tokenizer(tokenizer)), call, tools=[tool("f", s="string", n="integer")])
    assert calls(parsed) == [("f", expected)]


async def test_a_tool_turn_extends_the_tokens(known: Format, tokenizer: Any):
    agent = Agent(known.family(), tokenizer, known.one + "<|end_of_answer|>")
    first = await agent.ask(user("Weather?"), tools=TOOLS)
    assert first.messages[-1]["tool_calls"]
    second = await agent.ask(*results("Sunny"), tools=TOOLS)
    assert agent.suffix(first, second).startswith("<tool>Sunny")


def test_thinking_about_a_call_is_not_a_call(tokenizer: Any):
    codec = ChatCodec(HERMES.tokenizer(tokenizer))
    parsed = parse(codec, "<think>\n" + HERMES.two + "\n</think>\n\n" + HERMES.one)
    assert calls(parsed) == ONE
    assert "<tool_call>" in (parsed.reasoning or "")


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.add <|constrain|>json<|message|>",
        " to=functions.add<|channel|>commentary json<|message|>",
    ],
)
def test_harmony_messages(header: str, tokenizer: Any):
    """The messages of gpt-oss: thinking, calls and text in channels of their own."""
    marks = ("<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|channel|>", "<|message|>", "<|constrain|>")
    codec = ChatCodec(Format("", GPT_OSS, "", "", "", special=marks).tokenizer(tokenizer))
    ends = {codec.decode([token]) for token in codec.stop_token_ids}
    assert ends == {"<|return|>", "<|call|>", "<|end_of_answer|>"}
    thinking = "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant"
    parsed = parse(codec, thinking + header + '{"a": 1, "b": 2.5}', stop="<|call|>")
    assert (calls(parsed), parsed.reasoning) == ([("add", {"a": 1, "b": 2.5})], "I look.")
    parsed = parse(codec, thinking + "<|channel|>final<|message|>Sunny.", stop="<|return|>")
    assert parsed == ParsedAnswer("Sunny.", reasoning="I look.")


def test_the_parser_can_be_named_and_is_saved(tokenizer: Any, tmp_path: Path):
    plain = Format("", CHATML.replace("tool_call>", "call>"), "", "", "").tokenizer(tokenizer)
    assert not ChatCodec(plain).reads_tool_calls
    codec = ChatCodec(plain, {"name": "default", "tool_parser": "hermes"})
    assert calls(parse(codec, HERMES.one)) == ONE
    codec.save(tmp_path)
    plain.name_or_path = str(tmp_path)
    assert json.loads((tmp_path / "astuner_renderer.json").read_text()) == {"name": "default", "tool_parser": "hermes"}
    assert calls(parse(ChatCodec(plain), HERMES.one)) == ONE


def test_an_unknown_parser_is_rejected(tokenizer: Any):
    with pytest.raises(ConfigError, match=r"tool_parser 'mistrl' .*did you mean 'mistral'.*qwen3.*hermes"):
        ChatCodec(tokenizer, {"name": "default", "tool_parser": "mistrl"})
