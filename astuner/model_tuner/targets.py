"""Which of a workflow's agents are trained, and what speaks for the others."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from astuner.errors import WorkflowError
from astuner.model_tuner.codec import ParsedAnswer, ToolCall

DEFAULT_TARGET = "default"
_WITHOUT_TAG = " (the tag of calls that name none; give for_agent(name, target_tag=…))"

DebugModel = Callable[..., Any]
"""A chat model as AgentScope has them: awaited with messages, tools and tool_choice, it answers a `ChatResponse`."""


@dataclass(frozen=True, slots=True)
class FrozenModel:
    """What answers for a target that is not trained.

    Attributes:
        model: the endpoint's name of the model.
        base_url: an OpenAI-compatible endpoint; None for the model in training itself.
        api_key: the endpoint's key.
    """

    model: str = "policy"
    base_url: str | None = None
    api_key: str = ""


@dataclass(frozen=True, slots=True)
class Targets:
    """Which targets are trained.

    Attributes:
        trainable: their tags; None for all.
        frozen: what answers for the others, by tag.
    """

    trainable: tuple[str, ...] | None = None
    frozen: Mapping[str, FrozenModel] = field(default_factory=dict)

    def trains(self, tag: str) -> bool:
        """Whether the calls of a target are trained."""
        return self.trainable is None or tag in self.trainable

    def stand_in(self, tag: str, debug_model: DebugModel | None) -> FrozenModel | DebugModel:
        """Return what answers for a target that is not trained.

        Raises:
            WorkflowError: nothing does.
        """
        found = debug_model or self.frozen.get(tag)
        if found is None:
            raise WorkflowError(
                f"target {tag!r}{_WITHOUT_TAG if tag == DEFAULT_TARGET else ''} is not among "
                f"rollout.trainable_targets ({', '.join(self.trainable or ())}), and no model answers for it"
                f"{self._alike(tag)}: add it to trainable_targets, or name a model in "
                f"rollout.frozen_models.{tag} or as model_tuner.for_agent(…, debug_model=…)"
            )
        return found

    def _alike(self, tag: str) -> str:
        near = get_close_matches(tag, [*(self.trainable or ()), *self.frozen], 1)
        return f" (did you mean {near[0]!r}?)" if near else ""


async def ask_endpoint(
    model: FrozenModel,
    tag: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    options: Mapping[str, Any],
) -> ParsedAnswer:
    """Have an endpoint answer; `options` are further arguments of the request, None where they are not given.

    Raises:
        WorkflowError: it did not.
    """
    from openai import AsyncOpenAI, OpenAIError

    told: Any = [{key: value for key, value in message.items() if key != "reasoning_content"} for message in messages]
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if tools and given.get("tool_choice") != "none":
        given["tools"] = list(tools)
    else:
        given.pop("tool_choice", None)
    try:
        # A client belongs to the event loop that it was made on, and each episode has its own.
        async with AsyncOpenAI(base_url=model.base_url, api_key=model.api_key) as client:
            answer = await client.chat.completions.create(model=model.model, messages=told, **given)
            message = answer.choices[0].message
            wanted = [(call.id, call.function) for call in message.tool_calls or () if call.type == "function"]
    # What is no OpenAI server at all may answer anything.
    except (OpenAIError, AttributeError, LookupError, TypeError) as error:
        raise WorkflowError(
            f"rollout.frozen_models.{tag} ({model.model} at {model.base_url}) did not answer as an OpenAI endpoint "
            f"does: {error}"
        ) from error
    attempts = [(identity, function.name, _object(function.arguments)) for identity, function in wanted]
    calls = tuple(ToolCall(identity, name, given) for identity, name, given in attempts if given is not None)
    malformed = tuple(function.arguments for _, function in wanted if _object(function.arguments) is None)
    return ParsedAnswer("\n".join(text for text in (message.content, *malformed) if text), calls, None, malformed)


async def ask_debug_model(
    model: DebugModel,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str | None,
) -> ParsedAnswer:
    """Have an AgentScope chat model answer.

    Raises:
        WorkflowError: what it answers is no `ChatResponse`.
    """
    response = await model(list(messages), tools=list(tools) if tools else None, tool_choice=tool_choice)
    if isinstance(response, AsyncIterator):
        parts = [part async for part in response]  # each holds all that came before it
        response = parts[-1] if parts else None
    blocks: dict[str, list[Any]] = {"text": [], "thinking": [], "tool_use": []}
    try:
        for block in response.content:
            blocks.setdefault(block["type"], []).append(block)
    except (AttributeError, KeyError, TypeError) as error:
        raise WorkflowError(
            f"debug_model answered {response!r}; expected AgentScope's ChatResponse, or a stream of them"
        ) from error
    return ParsedAnswer(
        content="".join(block["text"] for block in blocks["text"]),
        tool_calls=tuple(ToolCall(block["id"], block["name"], block["input"]) for block in blocks["tool_use"]),
        reasoning="".join(block["thinking"] for block in blocks["thinking"]) or None,
    )


def _object(arguments: str) -> dict[str, Any] | None:
    try:
        value = json.loads(arguments)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
