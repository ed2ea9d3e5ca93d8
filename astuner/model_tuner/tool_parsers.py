"""Parsers for tool calls in an answer's text, for chat templates that `renderers` does not support.

The parsers in `renderers` need the delimiters as single vocabulary tokens, and treat every text argument in the XML
formats as malformed. These read the decoded text, and leave the types of XML arguments to the tool's schema.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from astuner.schema import Tools

HARMONY = "gpt-oss"
"""The format of gpt-oss, in which thinking, text and tool calls are messages in different channels."""
END_OF_CALL = "<|call|>"
"""The token with which the harmony format ends a tool call, and thereby the answer."""

JSON_CALL_BEGIN, JSON_CALL_END = "<tool_call>", "</tool_call>"
"""The tags around a tool call that is a JSON object, in the format of Hermes and Qwen."""


class UntypedText(str):
    """The text of an argument in an XML format. `with_declared_types` gives it the type of the tool's schema."""


@dataclass(frozen=True, slots=True)
class _Call:
    name: str
    arguments: Any
    id: str | None = None


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format in which models call tools.

    Attributes:
        template: matches chat templates that use the format.
        block: matches a call or a list of calls within an answer. Its group `body` is given to `read`. An empty group
            `end` marks a block that was cut off.
        read: returns the calls in a body. It raises ValueError if the body is malformed.
    """

    template: re.Pattern[str]
    block: re.Pattern[str]
    read: Callable[[str], Sequence[_Call]]


def _json_calls(body: str) -> list[_Call]:
    """Read JSON objects, or lists of them, with a name and arguments; commas and semicolons may separate them."""
    return [_json_call(value) for value in _json_values(body)]


def _single_json_call(body: str) -> list[_Call]:
    """Read one JSON object; the templates of Llama 3 reject answers with several calls."""
    return [_json_call(json.loads(body))]


def _json_values(text: str) -> Iterator[Any]:
    rest = text.strip()
    if not rest:
        raise ValueError("no JSON")
    while rest:
        value, end = json.JSONDecoder().raw_decode(rest)
        yield from value if isinstance(value, list) else [value]
        rest = rest[end:].lstrip(" \t\r\n,;")


def _json_call(value: Any) -> _Call:
    if not isinstance(value, dict):
        raise ValueError("a tool call is a JSON object")
    if isinstance(value.get("function"), dict):
        value = {**value, **value["function"]}
    name = value.get("name") or value.get("tool_name")
    if not isinstance(name, str):
        raise ValueError("a tool call has a name")
    arguments: Any = next((value[key] for key in ("arguments", "parameters") if key in value), {})
    identity = value.get("id") or value.get("tool_call_id")
    return _Call(name, arguments, identity if isinstance(identity, str) else None)


def _untyped(pairs: Sequence[tuple[str, str]]) -> dict[str, UntypedText]:
    return {key.strip(): UntypedText(value) for key, value in pairs}


def _function_call(body: str) -> list[_Call]:
    """Read `NAME><parameter=KEY>VALUE</parameter>…` or, as some models write a call, `NAME>JSON`."""
    name, _, rest = body.partition(">")
    if name.strip() and rest.lstrip().startswith("{"):
        return [_Call(name.strip(), json.loads(rest))]
    pairs = re.findall(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", rest, re.DOTALL)
    if not name.strip() or rest.count("<parameter=") != len(pairs) or (rest.strip() and not pairs):
        raise ValueError("a function has a name, and its parameters are closed")
    return [_Call(name.strip(), _untyped(pairs))]


def _invoke_calls(body: str) -> list[_Call]:
    """Read `<invoke name="NAME"><parameter name="KEY">VALUE</parameter>…</invoke>…`."""
    calls = []
    for name, inner in re.findall(r'<(?:｜DSML｜)?invoke name="([^"]+)">(.*?)</(?:｜DSML｜)?invoke>', body, re.DOTALL):
        pattern = r'<(?:｜DSML｜)?parameter name="([^"]+)"([^>]*)>\n?(.*?)\n?</(?:｜DSML｜)?parameter>'
        arguments = {
            key: value if 'string="true"' in kind else UntypedText(value)
            for key, kind, value in re.findall(pattern, inner, re.DOTALL)
        }
        calls.append(_Call(name, arguments))
    if not calls:
        raise ValueError("no invocation")
    return calls


def _glm_call(body: str) -> list[_Call]:
    """Read `NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…`."""
    name, _, rest = body.partition("<arg_key>")
    pairs = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", "<arg_key>" + rest, re.DOTALL)
    if not name.strip() or rest.count("<arg_value>") != len(pairs):
        raise ValueError("a tool call has a name, and its arguments are closed")
    return [_Call(name.strip(), _untyped(pairs))]


def _deepseek_call(body: str) -> list[_Call]:
    """Parse a tool call of DeepSeek: `function<sep>NAME` and fenced JSON (V3, R1), or `NAME<sep>JSON` (V3.1)."""
    left, separator, right = body.partition("<｜tool▁sep｜>")
    fenced = re.fullmatch(r"\s*(\S+)\s*\n\s*```(?:json)?\s*(.*?)\s*```\s*", right, re.DOTALL)
    name, arguments = fenced.groups() if fenced else (left.strip(), right)
    if not separator or not name:
        raise ValueError("a tool call has a name and a separator")
    return [_Call(name, json.loads(arguments))]


def _kimi_call(body: str) -> list[_Call]:
    """Read `functions.NAME:INDEX<|tool_call_argument_begin|>JSON`."""
    identity, separator, arguments = body.partition("<|tool_call_argument_begin|>")
    name = re.sub(r"^functions\.|:\d+$", "", identity.strip())
    if not separator or not name:
        raise ValueError("a tool call has a name and arguments")
    return [_Call(name, json.loads(arguments), identity.strip())]


def _mistral_calls(body: str) -> list[_Call]:
    """Read a JSON list of calls or, as later models write a call, `NAME[CALL_ID]ID[ARGS]JSON`."""
    if re.match(r"\s*\[?\s*\{", body):
        return _json_calls(body)
    match = re.fullmatch(r"\s*([^\s\[{]+)\s*(?:\[CALL_ID\]\s*(\w+))?\s*(?:\[ARGS\])?\s*(\{.*\})\s*", body, re.DOTALL)
    if match is None:
        raise ValueError("a tool call has a name and arguments")
    return [_Call(match[1], json.loads(match[3]), match[2])]


def _harmony_call(body: str) -> list[_Call]:
    """Read `NAME …<|message|>JSON`."""
    name, _, rest = body.partition("<")
    return [_Call(name.split()[0], json.loads(rest.partition("<|message|>")[2]))]


def _python_calls(body: str) -> list[_Call]:
    """Read a Python list of calls with constant keyword arguments."""
    try:
        expression = ast.parse(body.strip(), mode="eval").body
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError("not a Python expression") from error
    calls = []
    for call in expression.elts if isinstance(expression, ast.List) else [expression]:
        if not isinstance(call, ast.Call) or call.args or any(word.arg is None for word in call.keywords):
            raise ValueError("a tool call has keyword arguments only")
        arguments = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
        calls.append(_Call(ast.unparse(call.func), arguments))
    return calls


def _format(template: str, block: str, read: Callable[[str], Sequence[_Call]]) -> ToolFormat:
    return ToolFormat(re.compile(template, re.DOTALL), re.compile(block, re.DOTALL), read)


_TAGGED = r"<tool_call>(?P<body>.*?)(?P<end></tool_call>|\Z)"
# By the name for `tool_parser`; a template's format is the first that matches. The names are those of the renderers
# with this format. Formats whose delimiters occur in others come later.
TOOL_FORMATS: Mapping[str, ToolFormat] = {
    HARMONY: _format(
        r"<\|channel\|>",
        r"(?:<\|start\|>assistant)?(?:<\|channel\|>\w+)? to=functions\.(?P<body>.*?)(?P<end><\|call\|>|\Z)",
        _harmony_call,
    ),
    "glm": _format(r"<arg_key>", _TAGGED, _glm_call),
    "qwen3.5": _format(
        r"<function=",
        r"(?:<(?:\w+:)?tool_call>\s*)?<function=(?P<body>.*?)(?P<end></function>|\Z)(?:\s*</(?:\w+:)?tool_call>)?",
        _function_call,
    ),
    "minimax-m2": _format(
        r"<minimax:tool_call>", r"<minimax:tool_call>(?P<body>.*?)(?P<end></minimax:tool_call>|\Z)", _invoke_calls
    ),
    "deepseek-v3.2": _format(
        r"｜DSML｜",
        r"<｜DSML｜(?P<tag>\w+_calls)>(?P<body>.*?)(?P<end></｜DSML｜(?P=tag)>|\Z)",
        _invoke_calls,
    ),
    "deepseek-v3": _format(
        r"<｜tool▁calls?▁begin｜>",
        r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>(?P<body>.*?)(?P<end><｜tool▁call▁end｜>|\Z)"
        r"(?:\s*<｜tool▁calls▁end｜>)?",
        _deepseek_call,
    ),
    "kimi-k2": _format(
        r"<\|tool_calls?_(?:section_)?begin\|>",
        r"(?:<\|tool_calls?_section_begin\|>\s*)?<\|tool_call_begin\|>(?P<body>.*?)(?P<end><\|tool_call_end\|>|\Z)"
        r"(?:\s*<\|tool_calls?_section_end\|>)?",
        _kimi_call,
    ),
    "qwen3": _format(r"</?tool_call>", _TAGGED, _json_calls),
    "mistral": _format(r"\[TOOL_CALLS\]", r"\[TOOL_CALLS\](?P<body>.*?)(?=\[TOOL_CALLS\]|\Z)", _mistral_calls),
    "lfm2": _format(
        r"<\|tool_call_start\|>",
        r"<\|tool_call_start\|>(?P<body>.*?)(?P<end><\|tool_call_end\|>|\Z)",
        _python_calls,
    ),
    "command-a": _format(
        r"<\|START_ACTION\|>", r"<\|START_ACTION\|>(?P<body>.*?)(?P<end><\|END_ACTION\|>|\Z)", _json_calls
    ),
    "internlm": _format(
        r"<\|action_start\|>",
        r"<\|action_start\|>\s*<\|plugin\|>(?P<body>.*?)(?P<end><\|action_end\|>|\Z)",
        _json_calls,
    ),
    "jamba": _format(r"<tool_calls>", r"<tool_calls>(?P<body>.*?)(?P<end></tool_calls>|\Z)", _json_calls),
    "phi-4-mini": _format(
        r"<\|/?tool\|>|<\|/tool_call\|>|functools\[",
        r"(?:<\|tool_call\|>|functools(?=\s*\[))(?P<body>.*?)(?:<\|/tool_call\|>|\Z)",
        _json_calls,
    ),
    "granite": _format(
        r"<\|tool_call\|>|<function_call>|<\|start_of_role\|>.*tools",
        r"(?:<\|tool_call\|>|<function_call>|<tool_call>)(?P<body>.*?)(?:</tool_call>|(?=<function_call>)|\Z)",
        _json_calls,
    ),
    "llama-3": _format(
        r"<\|python_tag\|>|<\|start_header_id\|>.*parameters",
        r'\A\s*(?:<\|python_tag\|>\s*)?(?P<body>\{(?=[^{}]*"name"\s*:).*)\Z',
        _single_json_call,
    ),
}
_ALIASES = {"hermes": "qwen3"}
TOOL_PARSER_NAMES = (*TOOL_FORMATS, *_ALIASES)


def tool_format_of(template: str) -> str | None:
    """Return the name of the format that a chat template uses; None if it uses none that is known."""
    return next((name for name, known in TOOL_FORMATS.items() if known.template.search(template)), None)


def register_parsers() -> None:
    """Make the formats available to `renderers` as tool parsers; its own of the same names are replaced."""
    from renderers.parsers import REASONING_PARSERS, TOOL_PARSERS

    REASONING_PARSERS[HARMONY] = HarmonyReasoningParser

    registry: dict[str, Any] = TOOL_PARSERS
    registry.update({name: partial(TextToolParser, known) for name, known in TOOL_FORMATS.items()})
    registry.update({alias: registry[name] for alias, name in _ALIASES.items()})


@dataclass(frozen=True)
class HarmonyReasoningParser:
    """Separates the messages of an answer in the harmony format into thinking and text."""

    tokenizer: Any

    def extract(self, text: str) -> tuple[str | None, str]:
        """Return the text in the channel `analysis`, None if there is none, and the text in the other channels."""
        messages = re.findall(
            r"<\|channel\|>(\w+)[^<]*<\|message\|>(.*?)(?=<\|(?:end|start|return)\|>|\Z)", text, re.DOTALL
        )
        thinking = [body for channel, body in messages if channel == "analysis"]
        return "\n".join(thinking) or None, "\n".join(body for channel, body in messages if channel != "analysis")


@dataclass(frozen=True)
class TextToolParser:
    """Extracts tool calls in one format from an answer's tokens."""

    known: ToolFormat
    tokenizer: Any

    def extract(self, token_ids: list[int]) -> tuple[list[int], list[Any]]:
        """Return the token ids of the text around the tool calls, and a `ParsedToolCall` for each attempt to call."""
        text = self.tokenizer.decode(token_ids, skip_special_tokens=False)
        blocks = list(self.known.block.finditer(text))
        if not blocks:
            return token_ids, []
        before, after = text[: blocks[0].start()], self.known.block.sub("", text[blocks[0].end() :])
        rest = before + after if after.strip() else before
        attempts = [attempt for block in blocks for attempt in self._attempts(block)]
        return self.tokenizer.encode(rest, add_special_tokens=False), attempts

    def _attempts(self, block: re.Match[str]) -> list[Any]:
        from renderers.base import ParsedToolCall, ToolCallParseStatus

        if block.groupdict().get("end") == "":
            return [ParsedToolCall(raw=block[0], status=ToolCallParseStatus.UNCLOSED_BLOCK)]
        try:
            calls = self.known.read(block["body"])
        except (ValueError, TypeError, RecursionError):
            calls = []
        if not calls or not all(isinstance(call.arguments, dict) for call in calls):
            return [ParsedToolCall(raw=block[0], status=ToolCallParseStatus.MALFORMED_STRUCTURE)]
        # The block's text is that of its first call, so that it is repeated once if no tools are offered.
        return [
            ParsedToolCall(raw="" if index else block[0], name=call.name, arguments=call.arguments, id=call.id)
            for index, call in enumerate(calls)
        ]


def with_declared_types(name: str, arguments: Mapping[str, Any], tools: Tools | None) -> dict[str, Any]:
    """Return the arguments of a call; `UntypedText` gets the type that the tool's schema declares for it."""
    functions = [tool.get("function", tool) for tool in tools or ()]
    schema = next((function.get("parameters") for function in functions if function.get("name") == name), None) or {}
    declared = schema.get("properties") or {}
    return {
        key: _typed(value, declared.get(key)) if isinstance(value, UntypedText) else value
        for key, value in arguments.items()
    }


def breaks_strict_schema(name: str, arguments: Mapping[str, Any], tools: Tools | None) -> bool:
    """Return whether a tool with `strict: true` declares a schema that the arguments of a call do not match."""
    functions = [tool.get("function", tool) for tool in tools or ()]
    strict = next((function for function in functions if function.get("name") == name and function.get("strict")), None)
    if strict is None:
        return False
    from jsonschema.validators import validator_for

    schema = strict.get("parameters") or {}
    try:
        return not validator_for(schema)(schema).is_valid(dict(arguments))
    except Exception:  # jsonschema raises errors of many types for a schema that is not valid; it then checks nothing
        return False


def _typed(text: UntypedText, schema: Any) -> Any:
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind in ("string", ["string"]):
        return str(text)
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return str(text)
