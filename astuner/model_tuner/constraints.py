"""Constraints on the form of an answer: JSON, required tool calls, and at most one tool call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from astuner.errors import UnsupportedParameterError, short_repr
from astuner.model_tuner.answers import ChatAnswer
from astuner.model_tuner.chat_options import ChatOptions
from astuner.model_tuner.codec import ChatCodec
from astuner.model_tuner.tool_parsers import JSON_CALL_BEGIN, JSON_CALL_END
from astuner.schema import OutputConstraint

_END_OF_THINKING = "</think>"
_PROBE = "probe"


class AnswerForms:
    """Builds the constraints for answers, in the format that the model's renderer parses.

    Args:
        codec: the model's codec.
    """

    def __init__(self, codec: ChatCodec) -> None:
        self._codec = codec
        self._has_json_calls: bool | None = None

    def constraint(
        self,
        options: ChatOptions,
        tools: Sequence[Mapping[str, Any]] | None,
        prompt_ids: Sequence[int],
        max_tokens: int,
    ) -> OutputConstraint | None:
        """Return the constraint of an answer; None if it may be any text.

        It applies from the first token on, or from the end of the thinking that the prompt has opened. Thinking may
        then take half of the answer, so that there is room for the rest.

        Args:
            options: the parameters of the request.
            tools: the tools of the request.
            prompt_ids: the prompt.
            max_tokens: the maximum number of tokens of the answer.

        Raises:
            UnsupportedParameterError: the renderer does not parse tool calls as JSON in tags.
        """
        calls_required = options.tool_choice == "required"
        if not calls_required and options.json_schema is None:
            return None
        rules: dict[str, str] = {}
        forms: list[str] = []
        if calls_required or (tools and options.tool_choice == "auto" and self.has_json_calls):
            several = options.parallel_tool_calls
            forms.append("calls")
            rules |= self._call_rules(options, tools or (), several=several)
        if not calls_required:
            forms.append("json")
            rules["json"] = _json_rule(json.loads(options.json_schema or "{}"))
        thinks = self._opens_thinking(prompt_ids)
        if thinks:
            rules["thinking"] = f"{self._literal(_END_OF_THINKING)} /\\s*/"
            rules[f"thought[max_tokens={max(1, max_tokens // 2)}]"] = "/(?s:.*)/"
        start = f"({' | '.join(forms)})"
        grammar = f"start: {'thought thinking ' if thinks else ''}{start}\n"
        grammar += "".join(f"{name}: {rule}\n" for name, rule in rules.items())
        alone = forms == ["json"] and not thinks
        parameter = "tool_choice" if calls_required else "response_format"
        return OutputConstraint(parameter, grammar, options.json_schema if alone else None)

    def stop_ids(self, options: ChatOptions, tools: Sequence[Mapping[str, Any]] | None) -> tuple[int, ...]:
        """Return the tokens that end an answer: the end tokens and, if it may have one tool call only, the call's end.

        Raises:
            UnsupportedParameterError: the renderer does not parse tool calls as JSON in tags.
        """
        ends = self._codec.stop_token_ids
        if options.parallel_tool_calls or not tools or options.tool_choice == "none":
            return ends
        token = self._token_id(JSON_CALL_END)
        if token is None or not self.has_json_calls:
            raise self._unsupported("parallel_tool_calls", "False")
        return (*ends, token)

    @property
    def has_json_calls(self) -> bool:
        """Whether the renderer parses tool calls that are JSON in `<tool_call>` tags."""
        if self._has_json_calls is None:
            tool = {"type": "function", "function": {"name": _PROBE, "parameters": {"type": "object"}}}
            text = f'{JSON_CALL_BEGIN}\n{{"name": "{_PROBE}", "arguments": {{}}}}\n{JSON_CALL_END}'
            calls = self._codec.parse(self._encode(text), (), [tool]).tool_calls
            self._has_json_calls = [(call.name, dict(call.arguments)) for call in calls] == [(_PROBE, {})]
        return self._has_json_calls

    def _call_rules(self, options: ChatOptions, tools: Sequence[Mapping[str, Any]], *, several: bool) -> dict[str, str]:
        """Return the rules of one or several tool calls.

        Raises:
            UnsupportedParameterError: the renderer does not parse tool calls as JSON in tags.
        """
        if not self.has_json_calls:
            raise self._unsupported("tool_choice", options.tool_name or "required")
        functions = [tool["function"] for tool in tools]
        if options.tool_name is not None:
            functions = [function for function in functions if function["name"] == options.tool_name]
        begin, end = self._literal(JSON_CALL_BEGIN), self._literal(JSON_CALL_END)
        bodies = [f"function_{index}" for index in range(len(functions))]
        rules = {
            "calls": 'call ("\\n" call)*' if several else "call",
            "call": f'{begin} "\\n" ({" | ".join(bodies)}) "\\n" {end}',
        }
        for index, function in enumerate(functions):
            head = f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": '
            rules[f"function_{index}"] = f'{json.dumps(head, ensure_ascii=False)} arguments_{index} "}}"'
            rules[f"arguments_{index}"] = _json_rule(function.get("parameters") or {"type": "object"})
        return rules

    def _opens_thinking(self, prompt_ids: Sequence[int]) -> bool:
        """Return whether the prompt has opened thinking, which the answer must close."""
        answer = self._codec.parse(self._encode(f"x\n{_END_OF_THINKING}\n\ny"), prompt_ids, None)
        return (answer.reasoning or "").strip() == "x" and answer.content.strip() == "y"

    def _unsupported(self, name: str, value: str) -> UnsupportedParameterError:
        return UnsupportedParameterError(
            f"{name} ({value}) can be enforced only for models that write tool calls as JSON in {JSON_CALL_BEGIN} "
            f"tags, which the renderer {self._codec.renderer_name!r} does not read; leave {name} out, or set "
            "model.renderer to one that does",
            name,
        )

    def _token_id(self, text: str) -> int | None:
        ids = self._encode(text)
        return ids[0] if len(ids) == 1 else None

    def _literal(self, text: str) -> str:
        """Return a text in a grammar: its token if it has one, because parsers look for the token."""
        token = self._token_id(text)
        return json.dumps(text) if token is None else f"<[{token}]>"

    def _encode(self, text: str) -> list[int]:
        return list(self._codec.tokenizer.encode(text, add_special_tokens=False))


def _json_rule(schema: Mapping[str, Any]) -> str:
    """Return the rule of a JSON value. Its white space is bounded, because models tend to repeat it."""
    bounded = {"x-guidance": {"whitespace_pattern": r" |\n[ \t]{0,8}"}, **schema}
    return f"%json {json.dumps(bounded, ensure_ascii=False)}"


def check_enforced(answer: ChatAnswer) -> None:
    """Check that a complete answer has the form that was demanded, because some servers ignore constraints.

    Raises:
        UnsupportedParameterError: it does not have this form.
    """
    constraint, parsed = answer.call.sampling.constraint, answer.parsed
    is_cut = answer.call.finish_reason == "length" or answer.stop_string is not None
    if constraint is None or is_cut or parsed.tool_calls:
        return
    name = constraint.parameter
    if name == "response_format":
        try:
            json.loads(parsed.content)
        except ValueError:
            pass
        else:
            return
    raise UnsupportedParameterError(
        f"the engine did not enforce {name}: the answer is {short_repr(parsed.content)}. Leave {name} out, or use an "
        "engine that supports it",
        name,
    )
