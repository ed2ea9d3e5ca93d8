"""Small chat templates with the traits of model families, and the text that they add for new messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

_HERMES_TURNS = """
{%- if tools %}
    {{- '<|im_start|>system\\n' + (messages[0].content if messages[0].role == 'system' else '') }}
    {{- '\\ntools: ' + tools | tojson + '</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set last = namespace(question=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.question = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{- '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        THINKING
        {{- m.content }}
        {%- for call in m.tool_calls or [] %}
            {{- '\\n' if m.content or not loop.first else '' }}
            {{- '<tool_call>\\n' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
            {{- '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user' if loop.previtem.role != 'tool' else '' }}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' else '' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

CHATML = _HERMES_TURNS.replace("THINKING", "")
# Thinking is kept within a tool cycle, and left out before the last question.
QWEN3 = _HERMES_TURNS.replace(
    "THINKING",
    """{%- if m.reasoning_content and loop.index0 > last.question %}
            {{- '<think>\\n' + m.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}""",
)
# BOS, a date, trimmed contents, tool results as "ipython", one tool call per message.
LLAMA3 = """{{- bos_token + '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + strftime_now('%d %b %Y') }}
{{- '\\n' + messages[0].content | trim if messages[0].role == 'system' else '' }}{{- '<|eot_id|>' }}
{%- for m in messages if m.role != 'system' %}
    {%- if m.tool_calls and m.tool_calls | length > 1 %}{{- raise_exception('one tool call at a time') }}{% endif %}
    {{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\\n\\n' }}
    {%- if m.tool_calls %}
        {%- set called = m.tool_calls[0].function %}
        {{- {'name': called.name, 'parameters': called.arguments} | tojson }}
    {%- elif m.role == 'tool' %}{{- m.content | tojson }}
    {%- else %}{{- m.content | trim }}{% endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
# No system role, user and model in turns, trimmed contents; the end of a turn is not the tokenizer's end token.
GEMMA = """{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'system' %}{{- raise_exception('there is no system role') }}{% endif %}
    {%- if m.role != ('user' if loop.index0 % 2 == 0 else 'assistant') %}
        {{- raise_exception('user and assistant must take turns') }}
    {%- endif %}
    {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else 'user') + '\\n' + m.content | trim }}
    {{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{% endif %}"""
# The system prompt is in the first question, the tools are before the last one, nothing is between turns. A prefix
# that does not end with a question or a result is an error, unless it ends with the conversation's last answer.
MISTRAL = """{{- bos_token }}
{%- set first = namespace(text='') %}
{%- if messages[0].role == 'system' %}{% set first.text = messages[0].content + '\\n\\n' %}{% endif %}
{%- set asked = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for m in messages if m.role != 'system' %}
    {%- if m.role == 'user' %}
        {{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' if tools and m == asked[-1] else '' }}
        {{- '[INST]' + (first.text if loop.first else '') + m.content + '[/INST]' }}
    {%- elif m.tool_calls %}
        {{- '[TOOL_CALLS][' }}
        {%- for call in m.tool_calls %}
            {{- ', ' if not loop.first else '' }}
            {{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif m.role == 'tool' %}
        {%- if not m.tool_call_id %}{{- raise_exception('a tool result needs the id of its call') }}{% endif %}
        {{- '[TOOL_RESULTS]' + {'content': m.content, 'call_id': m.tool_call_id} | tojson + '[/TOOL_RESULTS]' }}
    {%- elif loop.last and not add_generation_prompt %}{{- raise_exception('the last message must be a question') }}
    {%- else %}{{- m.content + eos_token }}{% endif %}
{%- endfor %}"""
# Thinking is cut from every earlier answer; parallel results share one block, after which no header follows.
DEEPSEEK = """{{- bos_token }}{{- messages[0].content if messages[0].role == 'system' else '' }}
{{- tools | tojson if tools else '' }}
{%- for m in messages if m.role != 'system' %}
    {%- if m.role == 'user' %}{{- '<｜User｜>' + m.content }}
    {%- elif m.role == 'assistant' %}
        {{- '<｜Assistant｜>' if loop.previtem.role == 'user' else '' }}
        {{- m.content.split('</think>')[-1] }}
        {%- if m.tool_calls %}
            {{- '<｜tool▁calls▁begin｜>' }}
            {%- for call in m.tool_calls %}
                {{- '\\n' if not loop.first else '' }}
                {{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' }}
                {{- call.function.arguments | tojson + '\\n```<｜tool▁call▁end｜>' }}
            {%- endfor %}
            {{- '<｜tool▁calls▁end｜>' }}
        {%- endif %}
        {{- eos_token }}
    {%- elif m.role == 'tool' %}
        {{- '<｜tool▁outputs▁begin｜>' if loop.previtem.role != 'tool' else '' }}
        {{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
        {{- '<｜tool▁outputs▁end｜>' if loop.last or loop.nextitem.role != 'tool' else '' }}
    {%- endif %}
{%- endfor %}
{{- '<｜Assistant｜>' if add_generation_prompt and messages[-1].role == 'user' else '' }}"""

_DEEPSEEK_MARKUP = [
    f"<｜tool▁{part}｜>"
    for part in (
        *("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"),
        *("outputs▁begin", "outputs▁end", "output▁begin", "output▁end"),
    )
]


@dataclass(frozen=True)
class Family:
    """A template, its special tokens, and how it writes tool calls, a question, results, and the end of a turn."""

    name: str
    template: str
    eos: str
    calls: Callable[[list[Mapping[str, Any]]], str]
    asks: Callable[[str], str]
    results: Callable[[list[str]], str]
    special: list[str] = field(default_factory=list)
    bos: str | None = None
    end: str = ""
    between: str = ""
    renderer: str | Mapping[str, Any] = "auto"

    @property
    def stop(self) -> str:
        """The token that ends an answer."""
        return self.end or self.eos

    def tokenizer(self, base: Any) -> Any:
        """`base`, a tokenizer, with its special tokens and template replaced by this family's."""
        from tokenizers import Tokenizer

        made = type(base)(
            tokenizer_object=Tokenizer.from_str(base.backend_tokenizer.to_str()),
            eos_token=self.eos,
            bos_token=self.bos,
            additional_special_tokens=self.special,
            clean_up_tokenization_spaces=False,
        )
        made.chat_template = self.template
        return made


def _hermes(calls: list[Mapping[str, Any]]) -> str:
    return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


def _hermes_results(results: list[str]) -> str:
    inner = "".join(f"\n<tool_response>\n{text}\n</tool_response>" for text in results)
    return f"<|im_start|>user{inner}<|im_end|>\n<|im_start|>assistant\n"


def _hermes_asks(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def _llama_turn(role: str, text: str) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n{text}<|eot_id|>"


def _deepseek(calls: list[Mapping[str, Any]]) -> str:
    inner = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call['name']}\n```json\n{json.dumps(call['arguments'])}\n```"
        "<｜tool▁call▁end｜>"
        for call in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def _deepseek_results(results: list[str]) -> str:
    inner = "".join(f"<｜tool▁output▁begin｜>{text}<｜tool▁output▁end｜>" for text in results)
    return f"<｜tool▁outputs▁begin｜>{inner}<｜tool▁outputs▁end｜>"


_QWEN = {"eos": "<|im_end|>", "calls": _hermes, "asks": _hermes_asks, "results": _hermes_results, "between": "\n"}
_LLAMA: dict[str, Any] = {
    "eos": "<|eot_id|>",
    "bos": "<|begin_of_text|>",
    "special": ["<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>", "<|eom_id|>"],
    "calls": lambda calls: "; ".join(
        json.dumps({"name": call["name"], "parameters": call["arguments"]}) for call in calls
    ),
    "asks": lambda text: _llama_turn("user", text) + "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "results": lambda results: (
        "".join(_llama_turn("ipython", json.dumps(text)) for text in results)
        + "<|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
}
_DEEPSEEK: dict[str, Any] = {
    "eos": "<｜end▁of▁sentence｜>",
    "bos": "<｜begin▁of▁sentence｜>",
    "special": ["<｜User｜>", "<｜Assistant｜>", *_DEEPSEEK_MARKUP],
    "calls": _deepseek,
    "asks": lambda text: f"<｜User｜>{text}<｜Assistant｜>",
    "results": _deepseek_results,
}

FAMILIES = [
    Family("chatml", CHATML, **_QWEN),
    Family("qwen3", QWEN3, **_QWEN),
    Family("qwen3-renderer", QWEN3, renderer="qwen3", **_QWEN),
    Family("llama3", LLAMA3, **_LLAMA),
    Family("llama3-renderer", LLAMA3, renderer="llama-3", **_LLAMA),
    Family(
        "gemma",
        GEMMA,
        eos="<eos>",
        end="<end_of_turn>",
        bos="<bos>",
        special=["<start_of_turn>", "<end_of_turn>"],
        calls=lambda calls: f"```tool_code\n{json.dumps(calls)}\n```",
        asks=lambda text: f"<start_of_turn>user\n{text}<end_of_turn>\n<start_of_turn>model\n",
        results=lambda results: "",
        between="\n",
    ),
    Family(
        "mistral",
        MISTRAL,
        eos="</s>",
        bos="<s>",
        special=[f"[{mark}]" for mark in ("INST", "/INST", "TOOL_CALLS", "TOOL_RESULTS", "/TOOL_RESULTS")],
        calls=lambda calls: f"[TOOL_CALLS]{json.dumps(calls)}",
        asks=lambda text: f"[INST]{text}[/INST]",
        results=lambda results: "".join(
            f'[TOOL_RESULTS]{{"content": "{text}", "call_id": "id{place}"}}[/TOOL_RESULTS]'
            for place, text in enumerate(results)
        ),
    ),
    Family("deepseek", DEEPSEEK, **_DEEPSEEK),
    Family("deepseek-renderer", DEEPSEEK, renderer="deepseek-v3", **_DEEPSEEK),
]
