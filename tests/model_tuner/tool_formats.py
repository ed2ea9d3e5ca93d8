"""Chat templates of model families, in excerpts that show their tool calls, and answers as these models write them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.model_tuner.templates import Family

ONE = [("get-weather", {"city": "Paris", "days": 3})]
TWO = [*ONE, ("add", {"a": 1, "b": 2.5})]


@dataclass(frozen=True)
class Format:
    """A template and answers in its format.

    Attributes:
        parser: the name of the format.
        template: the chat template.
        one: an answer with the call `ONE`.
        two: an answer with the calls `TWO`; empty if the format has one call per answer.
        broken: an answer with a malformed call.
        special: special tokens of the tokenizer; the other delimiters are ordinary text.
        text: the text before the call in `one`.
    """

    parser: str
    template: str
    one: str
    two: str
    broken: str
    special: tuple[str, ...] = ()
    text: str = ""

    def family(self) -> Family:
        return Family(
            self.parser,
            self.template,
            eos="<|end_of_answer|>",
            calls=str,
            asks=str,
            results=str,
            special=list(self.special),
        )

    def tokenizer(self, base: Any) -> Any:
        return self.family().tokenizer(base)


def template(assistant: str, tools: str, user: str = "<user>", prompt: str = "<assistant>") -> str:
    """A template that writes the tools, questions, results and calls; `assistant` writes `m.tool_calls`."""
    return (
        tools
        + "{%- for m in messages %}{%- if m.role == 'assistant' %}{{- '"
        + prompt
        + "' + (m.content or '') }}{%- if m.tool_calls %}"
        + assistant
        + "{%- endif %}{{- '<|end_of_answer|>' }}{%- elif m.role == 'tool' %}{{- '<tool>' + m.content }}"
        "{%- else %}{{- '"
        + user
        + "' + m.content }}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '"
        + prompt
        + "' }}{%- endif %}"
    )


def each(body: str) -> str:
    return "{%- for c in m.tool_calls %}" + body + "{%- endfor %}"


_LIST = "{%- if tools %}{{- tools | tojson }}{%- endif %}"
_JSON = "{{- {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}"
_GENERIC = '{"name": "get-weather", "arguments": {"city": "Paris", "days": 3}}'
_GENERIC_ADD = '{"name": "add", "arguments": {"a": 1, "b": 2.5}}'
_PARAMETERS = "{%- for key, value in c.function.arguments | items %}"
_DS_CALL = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
_KIMI = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_KIMI_CALL = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"

HERMES = Format(
    "qwen3",
    template(
        each("{{- '\\n<tool_call>\\n' }}" + _JSON + "{{- '\\n</tool_call>' }}"),
        "{%- if tools %}{{- '# Tools\\n<tools>' + tools | tojson + '</tools>\\nreturn a json object within "
        "<tool_call></tool_call> XML tags' }}{%- endif %}",
    ),
    one=f"I look.\n<tool_call>\n{_GENERIC}\n</tool_call>",
    two=f"<tool_call>\n{_GENERIC}\n</tool_call>\n<tool_call>\n{_GENERIC_ADD}\n</tool_call>",
    broken='<tool_call>\n{"name": "add", "arguments": {"a": 1\n</tool_call>',
    text="I look.\n",
)
FORMATS = [
    HERMES,
    # SmolLM2 writes a list within the tags
    Format(
        "qwen3",
        template("{{- '<tool_call>' + m.tool_calls | tojson + '</tool_call>' }}", _LIST),
        one=f"<tool_call>[{_GENERIC}]</tool_call>",
        two=f"<tool_call>[{_GENERIC}, {_GENERIC_ADD}]</tool_call>",
        broken=f"<tool_call>[{_GENERIC}</tool_call>",
    ),
    Format(
        "qwen3.5",
        template(
            each(
                "{{- '\\n<tool_call>\\n<function=' + c.function.name + '>\\n' }}"
                + _PARAMETERS
                + "{{- '<parameter=' + key + '>\\n' + value | string + '\\n</parameter>\\n' }}{%- endfor %}"
                "{{- '</function>\\n</tool_call>' }}"
            ),
            _LIST,
        ),
        one="<tool_call>\n<function=get-weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>",
        two="<tool_call>\n<function=get-weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
        "<parameter=b>\n2.5\n</parameter>\n</function>\n</tool_call>",
        broken="<tool_call>\n<function=add>\n<parameter=a>\n1\n</function>\n</tool_call>",
    ),
    Format(
        "glm",
        template(
            each(
                "{{- '\\n<tool_call>' + c.function.name }}"
                + _PARAMETERS
                + "{{- '\\n<arg_key>' + key + '</arg_key>\\n<arg_value>' + value | string + '</arg_value>' }}"
                "{%- endfor %}{{- '\\n</tool_call>' }}"
            ),
            _LIST,
        ),
        one="\n<tool_call>get-weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>",
        two="<tool_call>get-weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call><tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
        "<arg_key>b</arg_key>\n<arg_value>2.5</arg_value>\n</tool_call>",
        broken="<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1\n</tool_call>",
        special=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    Format(
        "minimax-m2",
        template(
            "{{- '<minimax:tool_call>' }}"
            + each(
                "{{- '\\n<invoke name=\"' + c.function.name + '\">' }}"
                + _PARAMETERS
                + "{{- '\\n<parameter name=\"' + key + '\">' + value | string + '</parameter>' }}{%- endfor %}"
                "{{- '\\n</invoke>' }}"
            )
            + "{{- '\\n</minimax:tool_call>' }}",
            _LIST,
        ),
        one='<minimax:tool_call>\n<invoke name="get-weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>',
        two='<minimax:tool_call>\n<invoke name="get-weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="add">\n<parameter name="a">1</parameter>\n'
        '<parameter name="b">2.5</parameter>\n</invoke>\n</minimax:tool_call>',
        broken="<minimax:tool_call>\nadd\n</minimax:tool_call>",
        special=("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    # DeepSeek V3 and R1; V3.1
    Format(
        "deepseek-v3",
        template(
            "{{- '<｜tool▁calls▁begin｜>' }}"
            + each(
                f"{{{{- '{_DS_CALL}' + c.function.name + '\\n```json\\n' + c.function.arguments + '\\n```"
                "<｜tool▁call▁end｜>' }}"
            )
            + "{{- '<｜tool▁calls▁end｜>' }}",
            _LIST,
        ),
        one=f"<｜tool▁calls▁begin｜>{_DS_CALL}get-weather\n```json\n"
        '{"city": "Paris", "days": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        two=f"<｜tool▁calls▁begin｜>{_DS_CALL}get-weather\n```json\n"
        f'{{"city": "Paris", "days": 3}}\n```<｜tool▁call▁end｜>\n{_DS_CALL}add\n```json\n'
        '{"a": 1, "b": 2.5}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        broken=f'<｜tool▁calls▁begin｜>{_DS_CALL}add\n```json\n{{"a": 1\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        special=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    ),
    Format(
        "deepseek-v3",
        template(
            "{{- '<｜tool▁calls▁begin｜>' }}"
            + each(
                "{{- '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + c.function.arguments | tojson + "
                "'<｜tool▁call▁end｜>' }}"
            )
            + "{{- '<｜tool▁calls▁end｜>' }}",
            _LIST,
        ),
        one='<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get-weather<｜tool▁sep｜>{"city": "Paris", "days": 3}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        two='<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get-weather<｜tool▁sep｜>{"city": "Paris", "days": 3}'
        '<｜tool▁call▁end｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "b": 2.5}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        broken='<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ),
    Format(
        "kimi-k2",
        template(
            f"{{{{- '{_KIMI[0]}' }}}}"
            + each(
                "{{- '<|tool_call_begin|>' + c.id + '<|tool_call_argument_begin|>' + c.function.arguments | tojson + "
                "'<|tool_call_end|>' }}"
            )
            + f"{{{{- '{_KIMI[1]}' }}}}",
            _LIST,
        ),
        one=_KIMI[0] + _KIMI_CALL.format("get-weather", 0, '{"city": "Paris", "days": 3}') + _KIMI[1],
        two=_KIMI[0]
        + _KIMI_CALL.format("get-weather", 0, '{"city": "Paris", "days": 3}')
        + _KIMI_CALL.format("add", 1, '{"a": 1, "b": 2.5}')
        + _KIMI[1],
        broken=_KIMI[0] + _KIMI_CALL.format("add", 0, '{"a": 1') + _KIMI[1],
        special=("<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>", *_KIMI),
    ),
    # Mistral 7B v0.3, with a list; Mistral Small 3.2 and Devstral, with the name before the arguments
    Format(
        "mistral",
        template("{{- '[TOOL_CALLS]' + m.tool_calls | tojson }}", "[AVAILABLE_TOOLS]" + _LIST),
        one=f"[TOOL_CALLS] [{_GENERIC}]",
        two=f"[TOOL_CALLS] [{_GENERIC}, {_GENERIC_ADD}]",
        broken=f"[TOOL_CALLS] [{_GENERIC}",
        special=("[TOOL_CALLS]",),
    ),
    Format(
        "mistral",
        template(each("{{- '[TOOL_CALLS]' + c.function.name + '[ARGS]' + c.function.arguments | tojson }}"), _LIST),
        one='[TOOL_CALLS]get-weather[CALL_ID]abc123def[ARGS]{"city": "Paris", "days": 3}',
        two='[TOOL_CALLS]get-weather[ARGS]{"city": "Paris", "days": 3}[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2.5}',
        broken='[TOOL_CALLS]add[ARGS]{"a": 1',
        special=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    ),
    Format(
        "llama-3",
        template(
            '{{- \'{"name": "\' + m.tool_calls[0].function.name + \'", "parameters": \' }}'
            "{{- m.tool_calls[0].function.arguments | tojson + '}' }}",
            '{%- if tools %}{{- \'Respond in the format {"name": function name, "parameters": dictionary}.\' }}'
            "{{- tools | tojson }}{%- endif %}",
            user="<|start_header_id|>user<|end_header_id|>\\n\\n",
            prompt="<|start_header_id|>assistant<|end_header_id|>\\n\\n",
        ),
        one='{"name": "get-weather", "parameters": {"city": "Paris", "days": 3}}',
        two="",
        broken='{"name": "add", "parameters": {"a": 1}',
    ),
    Format(
        "llama-3",
        template("{{- '<|python_tag|>' + m.tool_calls[0].function | tojson }}", _LIST),
        one='<|python_tag|>{"type": "function", "name": "get-weather", "parameters": {"city": "Paris", "days": 3}}',
        two="",
        broken='<|python_tag|>{"name": "add", "parameters": 1}',
        special=("<|python_tag|>",),
    ),
    Format(
        "granite",
        template("{{- '<|tool_call|>' + m.tool_calls | tojson }}", _LIST, user="<|start_of_role|>user<|end_of_role|>"),
        one=f"<|tool_call|>[{_GENERIC}]",
        two=f"<|tool_call|>[{_GENERIC}, {_GENERIC_ADD}]",
        broken=f"<|tool_call|>[{_GENERIC}",
        special=("<|tool_call|>",),
    ),
    Format(
        "phi-4-mini",
        template("{{- '<|tool_call|>' + m.tool_calls | tojson + '<|/tool_call|>' }}", "<|tool|>" + _LIST + "<|/tool|>"),
        one=f"<|tool_call|>[{_GENERIC}]<|/tool_call|>",
        two=f"functools[{_GENERIC}, {_GENERIC_ADD}]",
        broken=f"<|tool_call|>[{_GENERIC}<|/tool_call|>",
    ),
    Format(
        "lfm2",
        template("{{- '<|tool_call_start|>' + m.tool_calls | tojson + '<|tool_call_end|>' }}", _LIST),
        one="<|tool_call_start|>[get_weather(city='Paris', days=3)]<|tool_call_end|>",
        two="<|tool_call_start|>[get_weather(city='Paris', days=3), add(a=1, b=2.5)]<|tool_call_end|>",
        broken="<|tool_call_start|>[add(1, 2)]<|tool_call_end|>",
    ),
    Format(
        "command-a",
        template("{{- '<|START_ACTION|>' + m.tool_calls | tojson + '<|END_ACTION|>' }}", _LIST),
        one='<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "get-weather", "parameters": '
        '{"city": "Paris", "days": 3}}]<|END_ACTION|>',
        two='<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "get-weather", "parameters": '
        '{"city": "Paris", "days": 3}}, {"tool_call_id": "1", "tool_name": "add", "parameters": {"a": 1, "b": 2.5}}]'
        "<|END_ACTION|>",
        broken='<|START_ACTION|>[{"tool_name": 3}]<|END_ACTION|>',
        special=("<|START_ACTION|>", "<|END_ACTION|>"),
    ),
    Format(
        "internlm",
        template("{{- '<|action_start|><|plugin|>' + m.tool_calls | tojson + '<|action_end|>' }}", _LIST),
        one='<|action_start|><|plugin|>\n{"name": "get-weather", "parameters": {"city": "Paris", "days": 3}}'
        "<|action_end|>",
        two="",
        broken="<|action_start|><|plugin|>\nadd<|action_end|>",
        special=("<|action_start|>", "<|plugin|>", "<|action_end|>"),
    ),
    Format(
        "jamba",
        template("{{- '<tool_calls>' + m.tool_calls | tojson + '</tool_calls>' }}", _LIST),
        one=f"<tool_calls>[{_GENERIC}]</tool_calls>",
        two=f"<tool_calls>\n{_GENERIC}\n{_GENERIC_ADD}\n</tool_calls>",
        broken="<tool_calls>[{}]</tool_calls>",
    ),
    Format(
        "deepseek-v3.2",
        template(
            "{{- '<｜DSML｜function_calls>\\n' }}"
            + each(
                "{{- '<｜DSML｜invoke name=\"' + c.function.name + '\">\\n' }}"
                + _PARAMETERS
                + "{{- '<｜DSML｜parameter name=\"' + key + '\" string=\"' + 'false' + '\">' + "
                "value | string + '</｜DSML｜parameter>\\n' }}{%- endfor %}{{- '</｜DSML｜invoke>\\n' }}"
            )
            + "{{- '</｜DSML｜function_calls>' }}",
            _LIST,
        ),
        one='<｜DSML｜function_calls>\n<｜DSML｜invoke name="get-weather">\n'
        '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        two="",
        broken="<｜DSML｜function_calls>\nadd\n</｜DSML｜function_calls>",
    ),
]
