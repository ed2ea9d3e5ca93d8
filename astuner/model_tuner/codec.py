"""Conversion of chat messages to token ids and back, with the `renderers` package."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from astuner.errors import InvalidRequestError, ModelError, WorkflowError, first_line
from astuner.model_tuner.renderer_choice import RENDERER_FILE, TemplateText, choose_renderer
from astuner.model_tuner.template_trials import (
    TEMPLATE_ERRORS,
    TemplateAnswers,
    TemplateBridge,
    is_trained,
    without_empty_thinking,
)
from astuner.model_tuner.tool_parsers import (
    END_OF_CALL,
    HARMONY,
    JSON_CALL_END,
    breaks_strict_schema,
    with_declared_types,
)
from astuner.schema import LlmCall, Messages, Tools


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A well-formed tool call: `arguments` is the parsed JSON object."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """A parsed completion.

    Attributes:
        content: its text, including malformed tool calls as the model wrote them.
        tool_calls: the well-formed tool calls, in order.
        reasoning: its thinking; None if it has none.
        malformed: the malformed tool calls, as written.
    """

    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None
    malformed: tuple[str, ...] = ()


class ChatCodec:
    """Renders messages for a tokenizer, parses completions, and extends earlier calls without re-tokenising them.

    Args:
        tokenizer: a transformers tokenizer.
        renderer: `auto`, the name of a renderer, or a mapping with `name` and the renderer's options.

    Raises:
        ConfigError: the renderer or one of its options is unknown.
        ModelError: the tokenizer has no chat template, or lacks special tokens of the renderer.
    """

    def __init__(self, tokenizer: Any, renderer: str | Mapping[str, Any] = "auto") -> None:
        self.tokenizer = tokenizer
        self._chosen = choose_renderer(tokenizer, renderer)
        self._renderer = self._chosen.renderer
        self.renderer_name: str = self._renderer.config.name
        self._template_text = TemplateText(tokenizer, self._renderer.config)
        self._rendered_roles: dict[str, bool] = {}
        self.stop_token_ids: tuple[int, ...] = self._stop_token_ids()

    def save(self, folder: Path) -> None:
        """Write the tokenizer and the choice of renderer, so that the folder loads the same way under any name."""
        self.tokenizer.save_pretrained(folder)
        (folder / RENDERER_FILE).write_text(json.dumps(self._chosen.options()))

    @property
    def reads_tool_calls(self) -> bool:
        """Whether the renderer parses tool calls."""
        return self.renderer_name != "default" or self._renderer.config.tool_parser is not None

    def with_known_roles(self, messages: Messages) -> Sequence[Mapping[str, Any]]:
        """Return normalised messages with roles that the chat template renders.

        Some templates leave out messages with the roles `developer` and `function`, without an error. They get
        the roles `system` and `tool`.
        """
        roles = {role: other for role, other in _SIMILAR_ROLES.items() if any(m["role"] == role for m in messages)}
        lost = {role: other for role, other in roles.items() if not self._renders(role)}
        return [{**m, "role": lost.get(m["role"], m["role"])} for m in messages] if lost else messages

    def render(self, messages: Messages, tools: Tools | None) -> tuple[int, ...]:
        """Return the prompt ids for an assistant turn after `messages`, which must be normalised.

        Raises:
            WorkflowError: the chat template rejects the messages.
        """
        try:
            return tuple(self._render(messages, tools, prompt=True))
        except TEMPLATE_ERRORS as error:
            raise _rejection(messages, error) from error

    def bridge(
        self, previous: LlmCall, messages: Messages, n_covered: int, tools: Tools | None
    ) -> tuple[int, ...] | None:
        """Return the prompt ids that extend the tokens of `previous`, unchanged, by `messages[n_covered:]`.

        Args:
            previous: the call whose request and answer are `messages[:n_covered]`.
            messages: the messages of the new request, normalised.
            n_covered: the number of messages that `previous` covers.
            tools: the tools of both calls.

        Returns:
            The ids; None if the template would not keep the earlier tokens as a prefix.
        """
        bridged = self._bridge_by_renderer(previous, messages[n_covered:], tools)
        if bridged is not None:
            return bridged
        # A renderer declines if its template can drop earlier tokens, even if it keeps them in this conversation.
        closing = self._closing(messages, n_covered, tools)
        if closing is None:
            return None
        if self._chosen.drops_kept_thinking(messages[n_covered:]):
            # The prompt must not contain thinking that was kept until now and that the template drops.
            prompt = self._render(messages[: n_covered - 1], tools, prompt=True)
            if self.decode(prompt) != self.decode(previous.prompt_ids):
                return None
        answer = messages[n_covered - 1]
        ids = (*previous.prompt_ids, *previous.completion_ids)
        # The thinking was never closed. The template would close it with tokens that no rendering isolates.
        if answer.get("reasoning_content") and not (answer["content"] or answer.get("tool_calls")):
            return None
        if not self._is_truncated(previous):
            return (*ids, *closing[1:]) if closing[0] == ids[-1] else None
        # The end token was not sampled, so it becomes context. Within a list of tool calls, more would be missing.
        ends_within_calls = answer.get("tool_calls") and not self.decode(ids[-1:]).endswith(JSON_CALL_END)
        return None if ends_within_calls else (*ids, *closing)

    def is_truncation_only_obstacle(
        self, previous: LlmCall, messages: Messages, n_covered: int, tools: Tools | None
    ) -> bool:
        """Return whether `bridge`, with the same arguments, returns None only because `previous` was cut by length."""
        if not self._is_truncated(previous):
            return False
        return self._closing(messages, n_covered, tools) is not None

    def message_at(self, messages: Messages, tools: Tools | None, position: int) -> int:
        """Return the index of the message to which the token at `position` in the rendered `messages` belongs."""
        if self.renderer_name != "default":
            rendered = self._renderer.render(
                list(messages), tools=list(tools) if tools else None, add_generation_prompt=True
            )
            owners = rendered.message_indices
            return max([owner for owner in owners[: position + 1] if owner >= 0], default=0)
        low, high = 0, len(messages) - 1
        while low < high:
            middle = (low + high) // 2
            try:
                length = len(self._render(messages[: middle + 1], tools, prompt=False))
            except TEMPLATE_ERRORS:  # the template rejects this part of the conversation
                length = 0
            if length > position:
                high = middle
            else:
                low = middle + 1
        return low

    def rendered_answer(self, messages: Messages, tools: Tools | None) -> str | None:
        """Return the rendered text of the last message, an answer; None if it cannot be separated from the prompt."""
        try:
            prompt = self.decode(self._render(messages[:-1], tools, prompt=True))
            conversation = self.decode(self._render(messages, tools, prompt=False))
        except TEMPLATE_ERRORS:
            return None
        return conversation.removeprefix(prompt) if conversation.startswith(prompt) else None

    def completion_text(self, call: LlmCall) -> str:
        """Return the text of a call's completion without the end token."""
        return self.decode(call.completion_ids if self._is_truncated(call) else call.completion_ids[:-1])

    def encode(self, content: str | Sequence[int]) -> tuple[int, ...]:
        """Return the token ids of a text that is not rendered; token ids stay as they are.

        Raises:
            InvalidRequestError: an id is not in the vocabulary.
        """
        if isinstance(content, str):
            return tuple(self._encode(content))
        if (largest := max(content)) >= (size := len(self.tokenizer)):
            raise InvalidRequestError(f"prompt has the token id {largest}; the vocabulary ends at {size - 1}", "prompt")
        return tuple(content)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        return str(self.tokenizer.decode(list(ids)))

    def parse(self, completion_ids: Sequence[int], prompt_ids: Sequence[int], tools: Tools | None) -> ParsedAnswer:
        """Return a parsed completion.

        Tool calls that are malformed, that are made without tools, or whose arguments do not match the schema of a tool
        with `strict: true` become text.
        """
        prompt = list(prompt_ids)
        # The renderer `default` finds thinking that the prompt opens only behind the header of ChatML.
        if self.renderer_name == "default" and self.decode(prompt[-8:]).rstrip().endswith("<think>"):
            prompt = self._encode("<think>\n")
        parsed = self._renderer.parse_response(
            list(completion_ids), tools=list(tools) if tools else None, prompt_ids=prompt
        )
        calls, malformed = [], []
        for attempt in parsed.tool_calls:
            # A call of an unknown tool is passed on; the agent replies with an error that the model can read.
            well_formed = tools and attempt.name and attempt.status in ("ok", "unknown_tool")
            arguments = (
                with_declared_types(attempt.name, attempt.arguments, tools)
                if well_formed and isinstance(attempt.arguments, Mapping)
                else None
            )
            if arguments is not None and not breaks_strict_schema(attempt.name, arguments, tools):
                identity = attempt.id or f"call_{uuid.uuid4().hex[:16]}"
                calls.append(ToolCall(identity, attempt.name, arguments))
            elif attempt.raw:
                malformed.append(attempt.raw)
        content = "\n".join(text for text in (parsed.content, *malformed) if text)
        return ParsedAnswer(content, tuple(calls), parsed.reasoning_content, tuple(malformed))

    def transcript(self, messages: Messages, tools: Tools | None) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """Return a finished conversation's token ids, and whether each token is trained (both of length N).

        Trained are the thinking, text, tool calls and end tokens of the answers whose `weight` is not 0. The
        generation prompt, white space after the end token, and empty thinking that the template writes are not.

        Raises:
            WorkflowError: the chat template rejects the messages.
        """
        import renderers

        messages = self.with_known_roles(messages)

        if self.renderer_name == "default":
            ends = [self.decode([token]) for token in self.stop_token_ids]
            answers = TemplateAnswers(
                lambda turns, prompt: self._template_text.render(turns, tools, prompt=prompt), ends
            )
            try:
                ids, trained = answers.tokens(messages, self._encode, self.decode)
            except TEMPLATE_ERRORS as error:
                raise _rejection(messages, error) from error
            return tuple(ids), tuple(without_empty_thinking(trained, ids, self.decode))
        sample = renderers.build_training_sample(
            self._renderer,
            list(messages),
            role_to_mask=is_trained,
            tools=list(tools) if tools else None,
        )
        # `renderers` calls its own field `loss_mask`.
        trained = without_empty_thinking(list(map(bool, sample.loss_mask)), sample.token_ids, self.decode)
        return tuple(sample.token_ids), tuple(trained)

    def _renders(self, role: str) -> bool:
        """Return whether the chat template renders the messages of a role."""
        if role not in self._rendered_roles:
            text = f"a message of {role}"
            messages = [{"role": "user", "content": "?"}, {"role": role, "content": text, "name": "name"}]
            try:
                rendered = self.decode(
                    self._render(messages if role == "function" else messages[::-1], None, prompt=True)
                )
            except TEMPLATE_ERRORS:
                rendered = ""
            self._rendered_roles[role] = text in rendered
        return self._rendered_roles[role]

    def _bridge_by_renderer(
        self, previous: LlmCall, new: Sequence[Mapping[str, Any]], tools: Tools | None
    ) -> tuple[int, ...] | None:
        try:
            rendered = self._renderer.bridge_to_next_turn(
                list(previous.prompt_ids),
                list(previous.completion_ids),
                list(new),
                tools=list(tools) if tools else None,
            )
        except TEMPLATE_ERRORS:
            return None
        return None if rendered is None else tuple(rendered.token_ids)

    def _closing(self, messages: Messages, n_covered: int, tools: Tools | None) -> tuple[int, ...] | None:
        """Return what the template writes from the end token of the answer `messages[n_covered - 1]` on."""
        keep = self._chosen.keeps_thinking(messages[n_covered:])
        return self._template(tools).closing(messages, n_covered, self.stop_token_ids, keep_thinking=keep)

    def _template(self, tools: Tools | None) -> TemplateBridge:
        return TemplateBridge(lambda messages, prompt: self._render(messages, tools, prompt=prompt), self.decode)

    def _render(self, messages: Messages, tools: Tools | None, *, prompt: bool) -> list[int]:
        if self.renderer_name == "default":
            return self._encode(self._template_text.render(messages, tools, prompt=prompt))
        ids = self._renderer.render_ids(
            list(messages), tools=list(tools) if tools else None, add_generation_prompt=prompt
        )
        return list(ids)

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _is_truncated(self, call: LlmCall) -> bool:
        return not call.completion_ids or call.completion_ids[-1] not in self.stop_token_ids

    def _stop_token_ids(self) -> tuple[int, ...]:
        stop_ids = tuple(self._renderer.get_stop_token_ids())
        if self.renderer_name != "default":
            return stop_ids
        # The tokenizer's end token ends documents; some templates end turns with another token.
        special = {*self.tokenizer.all_special_ids, *self.tokenizer.get_added_vocab().values()}
        end = self._template(None).end_token(special)
        ends = [] if end is None else [end]
        if self._renderer.config.tool_parser == HARMONY:
            ends += [token for token in self.tokenizer.convert_tokens_to_ids([END_OF_CALL]) if token in special]
        return tuple(dict.fromkeys((*ends, *stop_ids)))


# The roles that some templates leave out, and the roles that replace them.
_SIMILAR_ROLES = {"developer": "system", "function": "tool"}


def _rejection(messages: Messages, error: Exception) -> WorkflowError:
    roles = ", ".join(str(message["role"]) for message in messages[-12:])
    return WorkflowError(
        f"the chat template of the model rejects the messages (roles {'…, ' * (len(messages) > 12)}{roles}): "
        f"{first_line(error)}. Send messages that the template supports (some templates have no system or tool "
        "role, or require user and assistant messages to alternate), or set another template in model.renderer"
    )


def load_tokenizer(path: str, key: str = "model.path") -> Any:
    """Load the tokenizer of a local folder or a Hugging Face name.

    Args:
        path: the folder or the name.
        key: the configuration key that names it, for messages.

    Raises:
        ModelError: there is no tokenizer, or it cannot be read.
    """
    from transformers import AutoTokenizer

    advice = "Use a folder with tokenizer.json next to the weights, or the name of a model on Hugging Face."
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    # For a damaged file, transformers, tokenizers and sentencepiece raise errors of many types.
    except Exception as error:
        raise ModelError(f"{key} {path!r}: the tokenizer cannot be loaded: {first_line(error)}. {advice}") from error
    # If a known model type has no tokenizer files, transformers returns a tokenizer with an empty vocabulary.
    if not tokenizer.encode("text", add_special_tokens=False):
        raise ModelError(f"{key} {path!r} has no tokenizer. {advice}")
    return tokenizer
