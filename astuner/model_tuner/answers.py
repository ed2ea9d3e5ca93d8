"""Answers of the model: their text up to a stop string, their form as messages, and the constraints on it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from astuner.errors import UnsupportedParameterError, short_repr
from astuner.llm_engine.stop_strings import StopStrings
from astuner.model_tuner.chat_options import ChatOptions
from astuner.model_tuner.codec import ChatCodec, ParsedAnswer, ToolCall
from astuner.model_tuner.tool_parsers import JSON_CALL_BEGIN, JSON_CALL_END
from astuner.schema import Completion, LlmCall, OutputConstraint, SamplingParams, Tools

T = TypeVar("T")
_END_OF_THINKING = "</think>"
_PROBE = "probe"


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """A parsed answer and the recorded call that produced it.

    Attributes:
        parsed: the answer; if a stop string ended it, without the string and what follows.
        call: the call, with all sampled tokens.
        stop_string: the stop string that ended the answer; None if it ended in another way.
        top_logprobs: for each sampled token, the ids and logprobs of the most likely tokens at its position; empty
            unless requested.
        alternatives: the other answers of a request with `n` above 1.
        text_tokens: the number of sampled tokens before the stop string or the end token.
        usage: the prompt and completion token counts that a frozen target's endpoint reports; empty if it reports none,
            and for the model in training.
    """

    parsed: ParsedAnswer
    call: LlmCall
    stop_string: str | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    alternatives: tuple[ChatAnswer, ...] = ()
    text_tokens: int = 0
    usage: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """The text of the answer, without thinking and without tool calls that could be parsed."""
        return self.parsed.content

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The well-formed tool calls, each with `id`, `name` and `arguments`."""
        return self.parsed.tool_calls

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message in OpenAI's format, to append to the messages of the next request."""
        return as_message(self.parsed)

    @property
    def token_counts(self) -> tuple[int, int]:
        """The numbers of prompt and completion tokens."""
        prompt, completion = self.usage or (len(self.call.prompt_ids), len(self.call.completion_ids))
        return prompt, completion


def as_message(parsed: ParsedAnswer) -> dict[str, Any]:
    """Return an answer as a message in OpenAI's format."""
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(dict(call.arguments), ensure_ascii=False),
                },
            }
            for call in parsed.tool_calls
        ]
    return message


@dataclass(frozen=True, slots=True)
class CutCompletion:
    """A completion up to a stop string.

    Attributes:
        completion: the completion up to the token that completes the string.
        text_ids: token ids to parse: those of the text before the string, or the whole completion if there is none.
        text_tokens: the number of sampled tokens before the string or the end token.
        stop_string: the string; None if the completion has none.
    """

    completion: Completion
    text_ids: tuple[int, ...]
    text_tokens: int
    stop_string: str | None = None


def cut_at_stop(
    completion: Completion, params: SamplingParams, end_ids: Sequence[int], tokenizer: Any
) -> CutCompletion:
    """Cut a completion after the token that completes a stop string.

    Engines that stop at strings return nothing beyond that token. For the others, the tokens after it are dropped,
    which changes neither the kept tokens nor their probabilities.

    Args:
        params: the parameters that it was sampled with.
        end_ids: the end tokens of the model's answers.
    """
    ids = completion.token_ids
    stops = StopStrings(params.stop, tokenizer) if params.stop else None
    end = stops.first_end(ids) if stops else None
    before = stops.before(ids[:end]) if stops and end is not None else None
    if before is None:
        return CutCompletion(completion, ids, len(ids) - (bool(ids) and ids[-1] in end_ids))
    completion = replace(
        completion,
        token_ids=ids[:end],
        logprobs=completion.logprobs[:end],
        top_logprobs=completion.top_logprobs[:end],
        sampler_logprobs=completion.sampler_logprobs[:end],
        finish_reason="stop",
    )
    text_tokens, text_ids, string = before
    return CutCompletion(completion, text_ids, text_tokens, string)


async def gather_answers(requests: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results from concurrent requests; if one fails, cancel the others and raise its error."""
    if len(requests) == 1:
        return [await requests[0]]
    tasks = [asyncio.ensure_future(request) for request in requests]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


class AnswerForms:
    """Builds the constraints for answers, in the format that the model's renderer parses.

    Args:
        codec: the model's codec.
    """

    def __init__(self, codec: ChatCodec) -> None:
        self._codec = codec
        self._has_json_calls: bool | None = None

    def constraint(
        self, options: ChatOptions, tools: Tools | None, prompt_ids: Sequence[int], max_tokens: int
    ) -> OutputConstraint | None:
        """Return the constraint of an answer; None if it may be any text.

        It applies from the first token on, or from the end of the thinking that the prompt has opened. Thinking may
        then take half of the answer, so that there is room for the rest.

        Args:
            options: the parameters of the request.
            max_tokens: the answer's maximum number of tokens.

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
        # Whether the prompt has opened thinking, which the answer must close.
        probe = self._codec.parse(self._encode(f"x\n{_END_OF_THINKING}\n\ny"), prompt_ids, None)
        thinks = (probe.reasoning or "").strip() == "x" and probe.content.strip() == "y"
        if thinks:
            rules["thinking"] = f"{self._literal(_END_OF_THINKING)} /\\s*/"
            rules[f"thought[max_tokens={max(1, max_tokens // 2)}]"] = "/(?s:.*)/"
        start = f"({' | '.join(forms)})"
        grammar = f"start: {'thought thinking ' if thinks else ''}{start}\n"
        grammar += "".join(f"{name}: {rule}\n" for name, rule in rules.items())
        alone = forms == ["json"] and not thinks
        parameter = "tool_choice" if calls_required else "response_format"
        return OutputConstraint(parameter, grammar, options.json_schema if alone else None)

    def stop_ids(self, options: ChatOptions, tools: Tools | None) -> tuple[int, ...]:
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

    def _call_rules(self, options: ChatOptions, tools: Tools, *, several: bool) -> dict[str, str]:
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
