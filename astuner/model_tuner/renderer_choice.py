"""Chooses a tokenizer's renderer, and the text for a chat template that `renderers` does not support."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from astuner.errors import ConfigError, ModelError, did_you_mean, field_problems
from astuner.model_tuner.template_trials import TEMPLATE_ERRORS
from astuner.model_tuner.tool_parsers import HARMONY, TOOL_PARSER_NAMES, register_parsers, tool_format_of
from astuner.schema import Messages, Tools

RENDERER_FILE = "astuner_renderer.json"
_RETENTIONS = ("tool_cycle", "all")


@dataclass(frozen=True, slots=True)
class ChosenRenderer:
    """A renderer.

    Attributes:
        renderer: a renderer of the `renderers` package.
        thinking_retention: for the renderer `default`, which thinking of earlier turns is kept although the template
            drops it: `tool_cycle` or `all`; None to do as the template does.
    """

    renderer: Any
    thinking_retention: str | None = None

    def keeps_thinking(self, new_messages: Messages) -> bool:
        """Return whether earlier thinking is kept although the template drops it, before these messages."""
        if self.thinking_retention == "tool_cycle":
            return all(message["role"] != "user" for message in new_messages)
        return self.thinking_retention == "all"

    def drops_kept_thinking(self, new_messages: Messages) -> bool:
        """Return whether these messages end the cycle of tool calls for which earlier thinking was kept."""
        return self.thinking_retention == "tool_cycle" and not self.keeps_thinking(new_messages)

    def options(self) -> dict[str, Any]:
        """Return the options that `choose_renderer` needs to make the same choice again."""
        config = self.renderer.config
        options = {**config.model_dump(mode="json", exclude_unset=True), "name": config.name}
        if self.thinking_retention is not None:
            options["thinking_retention"] = self.thinking_retention
        return options


def choose_renderer(tokenizer: Any, choice: str | Mapping[str, Any]) -> ChosenRenderer:
    """Return the renderer that `model.renderer` selects for a tokenizer.

    Raises:
        ConfigError: the renderer or one of its options is unknown.
        ModelError: the tokenizer has no chat template, or lacks special tokens of the renderer.
    """
    import renderers

    options: dict[str, Any] = {"name": choice} if isinstance(choice, str) else dict(choice)
    if options.get("name", "auto") == "auto":
        options = {**options, **_detect_renderer(tokenizer)}
    retention = None
    if options["name"] == "default":
        if not getattr(tokenizer, "chat_template", None):
            raise ModelError(
                f"the tokenizer of {tokenizer.name_or_path!r} has no chat template, so messages cannot be rendered. "
                "Use an instruction-tuned model, or set model.renderer to the model's family, for example qwen3."
            )
        register_parsers()
        options.setdefault("tool_parser", tool_format_of(_template_text(tokenizer)))
        if options["tool_parser"] == HARMONY:
            options.setdefault("reasoning_parser", HARMONY)
        retention = options.pop("thinking_retention", None)
        _check_default_options(options, retention)
    config = _renderer_config(options, choice)
    try:
        return ChosenRenderer(renderers.create_renderer(tokenizer, config), retention)
    except (AssertionError, ValueError, TypeError) as error:
        raise ModelError(
            f"model.renderer {options['name']!r} does not fit the tokenizer of {tokenizer.name_or_path!r}: {error}. "
            "Use the renderer of the model's family, or model.renderer: auto"
        ) from error


def _renderer_config(options: Mapping[str, Any], choice: str | Mapping[str, Any]) -> Any:
    """Return a renderer's configuration, an object from the `renderers` package."""
    import renderers
    from renderers.base import MODEL_RENDERER_MAP

    try:
        template = renderers.config_from_name(options["name"])
    except (ValueError, TypeError, KeyError) as error:
        names = sorted({"auto", "default", *MODEL_RENDERER_MAP.values()})
        hint = did_you_mean(options["name"], names, "did you mean {}? ")
        raise ConfigError(
            f"model.renderer {options['name']!r} is unknown; {hint}The renderers are: {', '.join(names)}"
        ) from error
    try:
        return type(template)(**options)
    except (ValueError, TypeError) as error:
        reason = "; ".join(field_problems(error)) if isinstance(error, ValidationError) else str(error)
        raise ConfigError(f"model.renderer {choice!r} cannot be used: {reason}") from error


def _check_default_options(options: Mapping[str, Any], retention: object) -> None:
    parser = options["tool_parser"]
    if parser is not None and parser not in TOOL_PARSER_NAMES:
        hint = did_you_mean(parser, TOOL_PARSER_NAMES, "did you mean {}? ")
        raise ConfigError(
            f"the tool_parser {parser!r} of model.renderer is unknown; {hint}"
            f"The parsers are: {', '.join(TOOL_PARSER_NAMES)}"
        )
    if retention is not None and retention not in _RETENTIONS:
        raise ConfigError(
            f"the thinking_retention {retention!r} of model.renderer is unknown; use {' or '.join(_RETENTIONS)}, or "
            "leave it out to keep the thinking that the chat template keeps"
        )


def _detect_renderer(tokenizer: Any) -> dict[str, Any]:
    """Return the renderer that was saved with the tokenizer, or one by model name, folder name or chat template."""
    from renderers.base import MODEL_RENDERER_MAP

    name = str(tokenizer.name_or_path).rstrip("/")
    if (saved := Path(name) / RENDERER_FILE).is_file():
        options: dict[str, Any] = json.loads(saved.read_text())
        return options
    by_folder = {model.rsplit("/", 1)[-1]: renderer for model, renderer in MODEL_RENDERER_MAP.items()}
    renderer = MODEL_RENDERER_MAP.get(name) or by_folder.get(name.rsplit("/", 1)[-1])
    if renderer:
        return {"name": renderer}
    return {"name": "default"}


def _template_text(tokenizer: Any) -> str:
    """Return the chat template; if there are several, the one for tools, and otherwise all of them."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, Mapping):
        return str(template.get("tool_use") or "\n".join(map(str, template.values())))
    return template or ""


@dataclass(frozen=True)
class TemplateText:
    """Renders messages to text with a tokenizer's chat template; for the renderer `default`.

    Attributes:
        tokenizer: a transformers tokenizer.
        config: the renderer's configuration; its additional options are template variables.
    """

    tokenizer: Any
    config: Any

    def render(self, messages: Messages, tools: Tools | None, *, prompt: bool) -> str:
        """Return the text of normalised messages; with `prompt`, it ends with the prompt for an answer.

        Raises:
            TemplateError, ValueError, TypeError, LookupError: the template rejects the messages (`TEMPLATE_ERRORS`).
        """
        if not self._needs_arguments_as_text:
            messages = [_with_parsed_arguments(message) for message in messages]
        return self._apply(messages, tools, prompt)

    def _apply(self, messages: Messages, tools: Tools | None, prompt: bool) -> str:
        options = {**(self.config.model_extra or {}), "add_generation_prompt": prompt, "tokenize": False}
        if tools:
            options["tools"] = list(tools)
        return str(self.tokenizer.apply_chat_template(list(messages), **options))

    @cached_property
    def _needs_arguments_as_text(self) -> bool:
        """Whether the chat template needs a tool call's arguments as JSON text instead of a mapping.

        A template writes `arguments | tojson`, loops over `arguments`, or concatenates them. Only the last form needs
        text.
        """
        function = {"name": "probe", "arguments": '{"key": "value"}'}
        call = {"id": "probe0001", "type": "function", "function": function}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "probe"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "probe", "tool_call_id": "probe0001", "name": "probe"},
        ]
        try:
            return "{'key': 'value'}" in self._apply([_with_parsed_arguments(m) for m in messages], None, True)
        except TEMPLATE_ERRORS:
            pass
        try:
            return '{"key": "value"}' in self._apply(messages, None, True)
        except TEMPLATE_ERRORS:
            return False


def _with_parsed_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose tool calls have their arguments as mappings; text that is not JSON stays text."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError):
                arguments = json.loads(arguments)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}
