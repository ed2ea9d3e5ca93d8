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

from astuner.errors import ConfigError, ModelError, WorkflowError
from astuner.model_tuner.template_bridge import REFUSALS, TemplateBridge
from astuner.schema import LlmCall

_RENDERER_FILE = "astuner_renderer.json"
# By what a chat template that `renderers` does not know writes for tool calls, the parser that reads them.
_TOOL_PARSERS = {"</tool_call>": "qwen3", "<｜tool▁calls▁begin｜>": "deepseek-v3"}


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
        self.renderer_name: str = self._renderer.config.name
        self.stop_token_ids: tuple[int, ...] = self._stop_token_ids()

    def save(self, folder: Path) -> None:
        """Write the tokenizer, and which renderer goes with it, so that the folder's name does not matter later."""
        self.tokenizer.save_pretrained(folder)
        config = self._renderer.config.model_dump(mode="json", exclude_unset=True)
        (folder / _RENDERER_FILE).write_text(json.dumps({**config, "name": self.renderer_name}))

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[int, ...]:
        """Return the prompt ids for an assistant turn after `messages` (normalised).

        Raises:
            WorkflowError: the chat template does not take these messages.
        """
        try:
            return tuple(self._render(messages, tools, prompt=True))
        except REFUSALS as error:
            roles = ", ".join(str(message["role"]) for message in messages[-12:])
            raise WorkflowError(
                f"the chat template of the model does not take these messages (roles {'…, ' * (len(messages) > 12)}"
                f"{roles}): {first_line(error)}. Send what the template knows (some know no system or tool role, or "
                "want user and assistant in turns), or name another template in model.renderer"
            ) from error

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
        bridged = self._bridge_by_renderer(previous, messages[known:], tools)
        if bridged is not None:
            return bridged
        # A renderer may decline what its template forgets in general though it forgets nothing here.
        closing = self._template(tools).closing(messages, known, self.stop_token_ids)
        if closing is None:
            return None
        answer = messages[known - 1]
        ids = (*previous.prompt_ids, *previous.completion_ids)
        # Thinking that was never closed: the template would close it, with tokens that no rendering singles out.
        if answer.get("reasoning_content") and not (answer["content"] or answer.get("tool_calls")):
            return None
        if not self._is_cut(previous):
            return (*ids, *closing[1:]) if closing[0] == ids[-1] else None
        # The end token that was not sampled becomes context. Within a list of tool calls more would be missing.
        return None if answer.get("tool_calls") else (*ids, *closing)

    def is_kept_but_for_the_cut(
        self,
        previous: LlmCall,
        messages: Sequence[Mapping[str, Any]],
        known: int,
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> bool:
        """Return whether `bridge` (same arguments) declined only because `previous` was cut by length."""
        if not self._is_cut(previous):
            return False
        return self._template(tools).closing(messages, known, self.stop_token_ids) is not None

    def message_at(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, position: int
    ) -> int:
        """Return the index of the message that the token at `position` of the rendered `messages` belongs to."""
        if self.renderer_name != "default":
            given = list(tools) if tools else None
            owners = self._renderer.render(list(messages), tools=given, add_generation_prompt=True).message_indices
            return max([owner for owner in owners[: position + 1] if owner >= 0], default=0)
        low, high = 0, len(messages) - 1
        while low < high:
            middle = (low + high) // 2
            if self._length(messages[: middle + 1], tools) > position:
                high = middle
            else:
                low = middle + 1
        return low

    def written(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> str | None:
        """Return the text that the last of `messages`, an answer, is rendered to; None where that cannot be told."""
        try:
            question = self.decode(self._render(messages[:-1], tools, prompt=True))
            answered = self.decode(self._render(messages, tools, prompt=False))
        except REFUSALS:
            return None
        return answered.removeprefix(question) if answered.startswith(question) else None

    def said(self, call: LlmCall) -> str:
        """Return the text of a call's completion without its end token."""
        return self.decode(call.completion_ids if self._is_cut(call) else call.completion_ids[:-1])

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        return str(self.tokenizer.decode(list(ids)))

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

    def _bridge_by_renderer(
        self,
        previous: LlmCall,
        new: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> tuple[int, ...] | None:
        try:
            rendered = self._renderer.bridge_to_next_turn(
                list(previous.prompt_ids),
                list(previous.completion_ids),
                list(new),
                tools=list(tools) if tools else None,
            )
        except REFUSALS:
            return None
        return None if rendered is None else tuple(rendered.token_ids)

    def _template(self, tools: Sequence[Mapping[str, Any]] | None) -> TemplateBridge:
        return TemplateBridge(lambda messages, prompt: self._render(messages, tools, prompt=prompt), self.decode)

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, *, prompt: bool
    ) -> list[int]:
        given = list(tools) if tools else None
        return list(self._renderer.render_ids(list(messages), tools=given, add_generation_prompt=prompt))

    def _length(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> int:
        """Return how many tokens a beginning of a conversation has, 0 where the template refuses it by itself."""
        try:
            return len(self._render(messages, tools, prompt=False))
        except REFUSALS:
            return 0

    def _is_cut(self, call: LlmCall) -> bool:
        return not call.completion_ids or call.completion_ids[-1] not in self.stop_token_ids

    def _stop_token_ids(self) -> tuple[int, ...]:
        known = tuple(self._renderer.get_stop_token_ids())
        if self.renderer_name != "default":
            return known
        # The tokenizer's end token ends documents; some templates end turns with another one.
        end = self._template(None).end_token(set(self.tokenizer.all_special_ids))
        return known if end is None or end in known else (end, *known)


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
    parsers = [parser for mark, parser in _TOOL_PARSERS.items() if isinstance(template, str) and mark in template]
    return {"name": "default", **({"tool_parser": parsers[0]} if parsers else {})}
