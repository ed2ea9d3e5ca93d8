"""Trained and frozen targets: the agents of a workflow that are trained, and the models that answer for the others."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from astuner.errors import WorkflowError, did_you_mean
from astuner.model_tuner.codec import ParsedAnswer, ToolCall
from astuner.model_tuner.messages import normalise
from astuner.schema import FinishReason, Messages, Tools

AUTO_AGENT = "auto"
"""The agent name with which `ModelTuner.chat` takes the name from the messages."""
_HASHED_CHARACTERS = 200
_NUMBER = re.compile(r"\d+")
DEFAULT_TARGET = "default"
_DEFAULT_TAG_HINT = " (the default tag; to set another, use for_agent(name, target_tag=…))"


class ExternalAnswer(NamedTuple):
    """The answer of another model than that in training; `finish_reason` and `usage` are as in `ChatAnswer`."""

    parsed: ParsedAnswer
    finish_reason: FinishReason = "stop"
    usage: tuple[int, ...] = ()


DebugModel = Callable[..., Any]
"""An AgentScope chat model: an async callable that maps messages, tools and tool_choice to a `ChatResponse`."""


@dataclass(frozen=True, slots=True)
class FrozenModel:
    """The model that answers for a target that is not trained.

    Attributes:
        model: the name of the model at the endpoint; `policy` or `starting_model` without an endpoint.
        base_url: an OpenAI-compatible endpoint; None for the model in training, or a copy of its starting weights.
        setting: the configuration key that names the model, for messages; "" for rollout.frozen_models.
    """

    model: str = "policy"
    base_url: str | None = None
    api_key: str = ""
    setting: str = ""


@dataclass(frozen=True, slots=True)
class Targets:
    """The trained and the frozen targets.

    Attributes:
        trainable: the tags of the trained targets; None for all that have no frozen model.
        frozen: the models that answer for the other targets, by tag.
        agents: the names of the agents that `AUTO_AGENT` distinguishes, each with a text by which its messages are
            recognised.
    """

    trainable: tuple[str, ...] | None = None
    frozen: Mapping[str, FrozenModel] = field(default_factory=dict)
    agents: Mapping[str, str] = field(default_factory=dict)

    def agent_of(self, messages: Messages, agent_name: str, target_tag: str) -> tuple[str, str]:
        """Return the name and the target of the agent that made a call.

        With the name `AUTO_AGENT`, the agent is identified by its messages. The name of an agent in `agents` is then
        also its target, unless the call names another target.

        Raises:
            WorkflowError: the messages are invalid.
        """
        if agent_name != AUTO_AGENT:
            return agent_name, target_tag
        conversation = normalise(messages)
        agent = _agent_by_text(conversation, self.agents)
        if agent is None:
            return _agent_by_hash(conversation), target_tag
        return agent, agent if target_tag == DEFAULT_TARGET else target_tag

    def trains(self, tag: str) -> bool:
        """Return whether the calls of a target are trained."""
        return tag not in self.frozen if self.trainable is None else tag in self.trainable

    def weights(self, tag: str) -> Literal["policy", "starting_model"]:
        """Return the weights that answer for a target without an endpoint."""
        frozen = self.frozen.get(tag, FrozenModel())
        return "starting_model" if not self.trains(tag) and frozen.model == "starting_model" else "policy"

    def frozen_model(self, tag: str, debug_model: DebugModel | None) -> FrozenModel | DebugModel:
        """Return the model that answers for a target that is not trained.

        Args:
            debug_model: takes precedence over the configuration.

        Raises:
            WorkflowError: there is no such model.
        """
        model = debug_model or self.frozen.get(tag)
        if model is None:
            suggestion = did_you_mean(tag, [*(self.trainable or ()), *self.frozen], " (did you mean {}?)")
            raise WorkflowError(
                f"target {tag!r}{_DEFAULT_TAG_HINT if tag == DEFAULT_TARGET else ''} is not among "
                f"rollout.trainable_targets ({', '.join(self.trainable or ())}), and has no frozen model"
                f"{suggestion}: add it to trainable_targets, or set a model in rollout.frozen_models.{tag} or with "
                "model_tuner.for_agent(…, debug_model=…)"
            )
        return model


async def call_endpoint(
    model: FrozenModel, tag: str, messages: Messages, tools: Tools | None, parameters: Mapping[str, Any]
) -> ExternalAnswer:
    """Return the answer of an OpenAI-compatible endpoint.

    Args:
        tag: the target, for error messages.
        messages: the conversation, normalised.
        tools: OpenAI tool definitions.
        parameters: further parameters of the request.

    Raises:
        WorkflowError: the endpoint did not answer as an OpenAI endpoint does.
    """
    from openai import AsyncOpenAI, OpenAIError
    from openai.resources.chat.completions import AsyncCompletions

    sent: Any = [{key: value for key, value in message.items() if key != "reasoning_content"} for message in messages]
    # The client rejects parameters that are not OpenAI's, such as top_k, outside of the extra body.
    known = inspect.signature(AsyncCompletions.create).parameters
    arguments: dict[str, Any] = {name: value for name, value in parameters.items() if name in known}
    arguments["extra_body"] = {name: value for name, value in parameters.items() if name not in known}
    if tools and arguments.get("tool_choice") != "none":
        arguments["tools"] = list(tools)
    else:
        arguments.pop("tool_choice", None)
    try:
        # A client is bound to the event loop that it was created on, and each episode has its own loop.
        async with AsyncOpenAI(base_url=model.base_url, api_key=model.api_key) as client:
            answer = await client.chat.completions.create(model=model.model, messages=sent, **arguments)
            message, reason = answer.choices[0].message, answer.choices[0].finish_reason
            usage = (answer.usage.prompt_tokens, answer.usage.completion_tokens) if answer.usage else ()
            attempts = [(call.id, call.function) for call in message.tool_calls or () if call.type == "function"]
    # A server of another kind can answer anything.
    except (OpenAIError, AttributeError, LookupError, TypeError) as error:
        name = model.setting or f"rollout.frozen_models.{tag}"
        raise WorkflowError(
            f"{name} ({model.model} at {model.base_url}) did not answer as an OpenAI endpoint does: {error}"
        ) from error
    calls, malformed = [], []
    for call_id, function in attempts:
        try:
            parsed = json.loads(function.arguments)
        except ValueError:
            parsed = None
        if isinstance(parsed, dict):
            calls.append(ToolCall(call_id, function.name, parsed))
        else:
            malformed.append(function.arguments)
    content = "\n".join(text for text in (message.content, *malformed) if text)
    answered = ParsedAnswer(content, tuple(calls), None, tuple(malformed))
    return ExternalAnswer(answered, "length" if reason == "length" else "stop", usage)


async def call_debug_model(
    model: DebugModel, messages: Messages, tools: Tools | None, parameters: Mapping[str, Any]
) -> ExternalAnswer:
    """Return the answer from an AgentScope chat model, which receives the request's parameters.

    Raises:
        WorkflowError: the model did not return a `ChatResponse`.
    """
    arguments = {"tool_choice": None, **parameters}
    response = await model(list(messages), tools=list(tools) if tools else None, **arguments)
    if isinstance(response, AsyncIterator):
        parts = [part async for part in response]  # each part has the text of all parts before it
        response = parts[-1] if parts else None
    blocks: dict[str, list[Any]] = {"text": [], "thinking": [], "tool_use": []}
    try:
        for block in response.content:
            blocks.setdefault(block["type"], []).append(block)
    except (AttributeError, KeyError, TypeError) as error:
        raise WorkflowError(
            f"debug_model answered {response!r}; expected AgentScope's ChatResponse, or an async iterator of them"
        ) from error
    answered = ParsedAnswer(
        content="".join(block["text"] for block in blocks["text"]),
        tool_calls=tuple(ToolCall(block["id"], block["name"], block["input"]) for block in blocks["tool_use"]),
        reasoning="".join(block["thinking"] for block in blocks["thinking"]) or None,
    )
    return ExternalAnswer(answered)


def _agent_by_text(messages: Messages, texts: Mapping[str, str]) -> str | None:
    """Return the agent whose text is in the last user message or, if there is none, in the system prompt.

    None if no text is in the normalised messages. A program often asks for a summary with a user message after the
    system prompt of its main agent.
    """
    asked = [message for message in messages if message.get("role") == "user"][-1:]
    for part in (asked, _system_messages(messages)):
        whole = "\n".join(message["content"] or "" for message in part)
        for agent, text in texts.items():
            if text in whole:
                return agent
    return None


def _agent_by_hash(messages: Messages) -> str:
    """Return `agent-HASH`, with a hash of the system prompt's beginning; `agent` if there is no system prompt.

    The hash is of the first line, up to 200 characters and without numbers. What follows often contains the date, the
    working folder or a list of files, which differ between episodes.
    """
    prompt = "\n".join(message["content"] or "" for message in _system_messages(messages)).strip()
    if not prompt:
        return "agent"
    start = _NUMBER.sub("", prompt.splitlines()[0][:_HASHED_CHARACTERS])
    return f"agent-{hashlib.blake2b(start.encode(errors='replace'), digest_size=4).hexdigest()}"


def _system_messages(messages: Messages) -> list[Mapping[str, Any]]:
    return [message for message in messages if message.get("role") in ("system", "developer")]
