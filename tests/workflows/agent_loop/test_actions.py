"""Forms of actions."""

from __future__ import annotations

from typing import Any

import pytest

from astuner.model_tuner.codec import ParsedAnswer, ToolCall
from astuner.workflows.agent_loop.players import ActionReader, UnreadableActionError

TOOLS = ({"type": "function", "function": {"name": "go", "parameters": {"type": "object"}}},)


@pytest.mark.parametrize(
    ("form", "text", "action"),
    [
        ("text", "  go north\n", "go north"),
        ("text", "a\nb", "a\nb"),
        ("box", r"\boxed{left}, or \boxed{ right }.", "right"),
        ("box", r"\boxed{a{b}c}", "a{b}c"),
        ("box", r"first \boxed{up} then \boxed{down", "up"),
        ("code", "```python\nx = 1\n```\nand\n```\ny = 2\nz\n```\n", "y = 2\nz"),
        ("code", "~~~sh\nls\n~~~", "ls"),
        ("code", "````md\n```\ninner\n```\n````", "```\ninner\n```"),
        ("json", '{"action": "up"}', "up"),
        ("json", 'I go.\n```json\n{"action": "up", "why": {"a": 1}}\n```', "up"),
        ("json", '{"action": "up"} {"action": "down"} {"thought": "no"}', "down"),
        ("json", '{"name": "go", "arguments": {"to": 3}}', {"name": "go", "arguments": {"to": 3}}),
        ("json", '{ {"action": "up"}', "up"),
    ],
)
def test_an_action_is_read(form: Any, text: str, action: Any) -> None:
    assert ActionReader(form).read(ParsedAnswer(text)) == action


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("text", ""),
        ("text", " \n"),
        ("box", "right"),
        ("box", r"\boxed{}"),
        ("box", r"\boxed{right"),
        ("code", "x = 1"),
        ("code", "```python\nx = 1"),
        ("code", "```python\n```"),
        ("json", "up"),
        ("json", '{"action": 3}'),
        ("json", '{"action": ""}'),
        ("json", '{"action": "up"'),
        ("json", '["action", "up"]'),
        ("json", '{"name": "go", "arguments": []}'),
        ("json", "{" * 5000),
        ("json", '{"a":' * 5000),
        ("tool_call", "right"),
    ],
)
def test_an_answer_without_an_action_is_an_error(form: Any, text: str) -> None:
    with pytest.raises(UnreadableActionError, match=r"^Your answer contains no (action|tool call)\. "):
        ActionReader(form).read(ParsedAnswer(text))


def test_tool_calls_are_actions() -> None:
    reader = ActionReader("tool_call", TOOLS)
    assert reader.tools == list(TOOLS)
    call = ToolCall("1", "go", {"to": "north"})
    assert reader.read(ParsedAnswer("I go.", (call,))) == {"name": "go", "arguments": {"to": "north"}}
    with pytest.raises(UnreadableActionError, match="contains 2 tool calls"):
        reader.read(ParsedAnswer("", (call, call)))
    with pytest.raises(UnreadableActionError, match=r"contains the malformed tool call <tool_call>\{"):
        reader.read(ParsedAnswer("", malformed=("<tool_call>{",)))


def test_an_environment_without_tools_has_the_tool_act() -> None:
    reader = ActionReader("tool_call")
    assert reader.read(ParsedAnswer("", (ToolCall("1", "act", {"action": " up "}),))) == "up"
    for call in (ToolCall("1", "go", {"action": "up"}), ToolCall("1", "act", {"action": 3}), ToolCall("1", "act", {})):
        with pytest.raises(UnreadableActionError, match="Call the tool act"):
            reader.read(ParsedAnswer("", (call,)))
    assert ActionReader("box").tools is None
