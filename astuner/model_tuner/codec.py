"""Messages to token ids and back, by the `renderers` package."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from astuner.errors import ConfigError, ModelError
from astuner.schema import LlmCall

# The end of the Hermes tool format, by which a chat template that `renderers` does not know is recognised.
_RENDERER_FILE = "astuner_renderer.json"
_HERMES_MARK = "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A well-formed tool call: `arguments` is the parsed JSON object."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """What a completion says.

    Attributes:
        content: its text; a malformed tool call stands in it as the model wrote it.
        tool_calls: the well-formed tool calls, in order.
        reasoning: the text of its thinking, None where it has none.
        malformed: the malformed tool calls, as written.
    """

    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None
    malformed: tuple[str, ...] = ()


class ChatCodec:
    """Renders messages for one tokenizer, parses completions, and extends earlier calls without re-tokenising."""

    def __init__(self, tokenizer: Any, renderer: str | Mapping[str, Any] = "auto") -> None:
        """Build the renderer.

        Args:
            tokenizer: a transformers tokenizer.
            renderer: `auto`, a name, or a mapping with `name` and that renderer's options.

        Raises:
            ConfigError: the renderer or an option of it is unknown.
            ModelError: the tokenizer has no chat template, or lacks the renderer's special tokens.
        """
        self.tokenizer = tokenizer
        self._renderer = _build_renderer(tokenizer, renderer)
        self.stop_token_ids: tuple[int, ...] = tuple(self._renderer.get_stop_token_ids())
        self.renderer_name: str = self._renderer.config.name

    def save(self, folder: Path) -> None:
        """Write the tokenizer, and which renderer goes with it, so that the folder's name does not matter later."""
        self.tokenizer.save_pretrained(folder)
        config = self._renderer.config.model_dump(mode="json", exclude_unset=True)
        (folder / _RENDERER_FILE).write_text(json.dumps({**config, "name": self.renderer_name}))

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[int, ...]:
        """Return the prompt ids for an assistant turn after `messages` (normalised)."""
        return tuple(
            self._renderer.render_ids(list(messages), tools=list(tools) if tools else None, add_generation_prompt=True)
        )

    def bridge(
        self,
        previous: LlmCall,
        messages: Sequence[Mapping[str, Any]],
        known: int,
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> tuple[int, ...] | None:
        """Return the prompt ids that extend `previous` by `messages[known:]`, its own tokens untouched.

        Args:
            previous: the call whose request and answer are `messages[:known]`.
            messages: the whole new request, normalised.
            known: how many of them `previous` covers.
            tools: the tools of both.

        Returns:
            None where the template would not keep the earlier tokens as a prefix.
        """
        tool_list = list(tools) if tools else None
        rendered = self._renderer.bridge_to_next_turn(
            list(previous.prompt_ids), list(previous.completion_ids), list(messages[known:]), tools=tool_list
        )
        if rendered is not None:
            return tuple(rendered.token_ids)
        if self.renderer_name == "default":
            return self._bridge_by_template(previous, messages, known, tool_list)
        return None

    def parse(
        self,
        completion_ids: Sequence[int],
        prompt_ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> ParsedAnswer:
        """Return what a completion says; a malformed tool call, or any where no tools are offered, becomes text."""
        parsed = self._renderer.parse_response(
            list(completion_ids), tools=list(tools) if tools else None, prompt_ids=list(prompt_ids)
        )
        calls, malformed = [], []
        for attempt in parsed.tool_calls:
            # An unknown tool's name is the agent's affair: it answers with an error that the model can read.
            well_formed = tools and attempt.name and attempt.status in ("ok", "unknown_tool")
            if well_formed and isinstance(attempt.arguments, Mapping):
                identity = attempt.id or f"call_{uuid.uuid4().hex[:16]}"
                calls.append(ToolCall(identity, attempt.name, attempt.arguments))
            else:
                malformed.append(attempt.raw)
        content = "\n".join(text for text in (parsed.content, *malformed) if text)
        return ParsedAnswer(content, tuple(calls), parsed.reasoning_content, tuple(malformed))

    def transcript(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """Return a finished conversation's ids and which of them the assistant wrote (both of length N).

        For a template that `renderers` does not know, the assistant's header counts as written.
        """
        import renderers

        sample = renderers.build_training_sample(
            self._renderer,
            list(messages),
            role_to_mask=lambda message: message["role"] == "assistant",
            tools=list(tools) if tools else None,
        )
        return tuple(sample.token_ids), tuple(bool(said) for said in sample.loss_mask)

    def _bridge_by_template(
        self,
        previous: LlmCall,
        messages: Sequence[Mapping[str, Any]],
        known: int,
        tools: list[Mapping[str, Any]] | None,
    ) -> tuple[int, ...] | None:
        """Extend by an unknown template's own suffix, once its renderings prove that it keeps history."""
        stop = previous.completion_ids[-1] if previous.completion_ids else None
        if stop not in self.stop_token_ids:
            return None
        question = self._template_text(messages[: known - 1], tools, prompt=True)
        answered = self._template_text(messages[:known], tools, prompt=False)
        extended = self._template_text(messages, tools, prompt=True)
        if not (answered.startswith(question) and extended.startswith(answered)):
            return None
        _, closed, after_stop = answered[len(question) :].rpartition(self.tokenizer.decode([stop]))
        if not closed or after_stop.strip():
            return None
        suffix = self.tokenizer.encode(after_stop + extended[len(answered) :], add_special_tokens=False)
        return (*previous.prompt_ids, *previous.completion_ids, *suffix)

    def _template_text(
        self, messages: Sequence[Mapping[str, Any]], tools: list[Mapping[str, Any]] | None, *, prompt: bool
    ) -> str:
        ids = self._renderer.render_ids(list(messages), tools=tools, add_generation_prompt=prompt)
        return str(self.tokenizer.decode(ids))


def load_tokenizer(path: str) -> Any:
    """Load the tokenizer of a local folder or a Hugging Face name.

    Raises:
        ModelError: there is none, or it cannot be read.
    """
    from transformers import AutoTokenizer

    advice = "Give a folder that has tokenizer.json beside the weights, or the name of a model on Hugging Face."
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    # A file that is spoilt makes transformers, tokenizers and sentencepiece raise errors of many kinds.
    except Exception as error:
        raise ModelError(
            f"model.path {path!r}: its tokenizer cannot be loaded: {first_line(error)}. {advice}"
        ) from error
    # For a known kind of model without tokenizer files, transformers makes one that knows no text at all.
    if not tokenizer.encode("text", add_special_tokens=False):
        raise ModelError(f"model.path {path!r} holds no tokenizer. {advice}")
    return tokenizer


def first_line(error: BaseException) -> str:
    """Return what a library's error says, without its further paragraphs and its last full stop."""
    line = str(error).strip().partition("\n")[0].rstrip(".")
    return line if isinstance(error, OSError | ValueError) and line else f"{type(error).__name__}: {line}"


def _in_one_line(error: ValueError | TypeError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    return "; ".join(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors())


def _build_renderer(tokenizer: Any, choice: str | Mapping[str, Any]) -> Any:
    import renderers

    options = {"name": choice} if isinstance(choice, str) else dict(choice)
    name = options.get("name", "auto")
    if name == "auto":
        options = {**options, **_recognise(tokenizer)}
    try:
        template = renderers.config_from_name(options["name"])
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(_no_such_renderer(options["name"])) from error
    try:
        config = type(template)(**options)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"model.renderer {choice!r} cannot be used: {_in_one_line(error)}") from error
    if options["name"] == "default" and not getattr(tokenizer, "chat_template", None):
        raise ModelError(
            f"the tokenizer of {tokenizer.name_or_path!r} has no chat template, so messages cannot be rendered. "
            "Use an instruction-tuned model, or name its family in model.renderer (e.g. qwen3)."
        )
    try:
        return renderers.create_renderer(tokenizer, config)
    except (AssertionError, ValueError, TypeError) as error:
        raise ModelError(
            f"model.renderer {options['name']!r} does not fit the tokenizer of {tokenizer.name_or_path!r}: {error}"
        ) from error


def _no_such_renderer(name: object) -> str:
    from renderers.base import MODEL_RENDERER_MAP

    names = sorted({"auto", "default", *MODEL_RENDERER_MAP.values()})
    near = get_close_matches(str(name), names, 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"model.renderer {name!r} is unknown; {hint}There are: {', '.join(names)}"


def _recognise(tokenizer: Any) -> dict[str, Any]:
    """Choose a renderer: the one it was tuned with, else by its name, its folder's name, or its chat template."""
    from renderers.base import MODEL_RENDERER_MAP

    name = str(tokenizer.name_or_path).rstrip("/")
    if (noted := Path(name) / _RENDERER_FILE).is_file():
        chosen: dict[str, Any] = json.loads(noted.read_text())
        return chosen
    by_folder = {known.rsplit("/", 1)[-1]: renderer for known, renderer in MODEL_RENDERER_MAP.items()}
    known = MODEL_RENDERER_MAP.get(name) or by_folder.get(name.rsplit("/", 1)[-1])
    if known:
        return {"name": known}
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, str) and _HERMES_MARK in template:
        return {"name": "default", "tool_parser": "qwen3"}
    return {"name": "default"}
