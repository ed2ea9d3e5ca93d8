"""ModelTuner: the chat model that a workflow gives to its agents."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from loguru import logger

from astuner.clock import timestamp
from astuner.errors import AgentMadness, CallLimitError, ContextLengthError, EpisodeStopped
from astuner.llm_engine.protocol import LlmEngine
from astuner.model_tuner.codec import ChatCodec, ParsedAnswer
from astuner.model_tuner.degenerate_output import find_degenerate_output
from astuner.model_tuner.history import History, Prompt
from astuner.model_tuner.messages import normalise, tools_hash
from astuner.model_tuner.targets import (
    DEFAULT_TARGET,
    DebugModel,
    FrozenModel,
    Targets,
    call_debug_model,
    call_endpoint,
)
from astuner.schema import Completion, LlmCall, SamplingParams

if TYPE_CHECKING:
    from agentscope.model import ChatResponse


@dataclass(frozen=True, slots=True)
class CallSettings:
    """Settings of an episode's LLM calls, from `rollout` and `data` of the configuration; lengths are in tokens."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 512
    max_model_len: int = 4096
    max_prompt_length: int = 4096
    max_response_length: int = 4096
    max_calls: int = 30
    disable_tools: bool = False
    madness_checklist: tuple[str, ...] = ()
    madness_ends_episode: bool = True


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """A parsed answer and the recorded call that produced it."""

    parsed: ParsedAnswer
    call: LlmCall


@dataclass(frozen=True, slots=True, eq=False)
class OpenCall:
    """An LLM call that has no answer yet; `prompt_tokens` is None for a model that is not the one in training."""

    agent_name: str
    target_tag: str
    start_time: float
    prompt_tokens: int | None


class ModelTuner:
    """The model in training, for one episode; pass it to an agent as its model.

    AgentScope agents accept it directly (`ReActAgent(model=model_tuner, …)`); other frameworks call `chat`. Every call
    is recorded token-exactly in `calls`.
    """

    # AgentScope reads these two from a chat model.
    stream = False

    def __init__(
        self,
        engine: LlmEngine,
        codec: ChatCodec,
        settings: CallSettings,
        *,
        episode_id: str,
        seed: int = 0,
        targets: Targets | None = None,
        on_call: Callable[[LlmCall], None] | None = None,
    ) -> None:
        """Bind the tuner to one episode.

        Args:
            engine: samples tokens.
            codec: converts messages to ids and back.
            settings: sampling parameters and lengths.
            episode_id: recorded with each call.
            seed: makes the sampling of the episode reproducible.
            targets: the agents of the workflow that are trained; None for all.
            on_call: called with each finished call.
        """
        self.model_name = "astuner"
        self.degenerate_output: str | None = None
        self.call_limit_error: CallLimitError | None = None
        self._engine = engine
        self._codec = codec
        self._settings = settings
        self._episode_id = episode_id
        self._seed = seed
        self._targets = targets or Targets()
        self._on_call = on_call
        self._history = History(codec)
        self._calls_started = 0
        self._rejected_calls = 0
        self._open_calls: dict[OpenCall, None] = {}

    @property
    def open_calls(self) -> tuple[OpenCall, ...]:
        """The calls that have no answer yet. Thread-safe."""
        return tuple(self._open_calls.copy())

    @property
    def calls(self) -> tuple[LlmCall, ...]:
        """The finished calls, in order of completion."""
        return tuple(self._history.calls)

    def for_agent(
        self, agent_name: str, target_tag: str = DEFAULT_TARGET, debug_model: DebugModel | None = None
    ) -> AgentModel:
        """Return the model for one of several agents.

        Args:
            agent_name: recorded with the agent's calls; rewards by agent use it as their key.
            target_tag: the agent's name in `rollout.trainable_targets` and `rollout.frozen_models`.
            debug_model: an AgentScope chat model that answers if the target is not trained.
        """
        return AgentModel(self, agent_name, target_tag, debug_model)

    async def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | None = None,
        **kwargs: Any,
    ) -> ChatResponse:
        """Answer like an AgentScope chat model (see `chat` for the errors)."""
        from astuner.model_tuner.agentscope_adapter import to_chat_response

        answer = await self.chat(messages, tools=tools, tool_choice=tool_choice, **kwargs)
        return to_chat_response(answer)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | None = None,
        max_tokens: int | None = None,
        agent_name: str = "",
        target_tag: str = DEFAULT_TARGET,
        debug_model: DebugModel | None = None,
        **ignored: Any,
    ) -> ChatAnswer:
        """Sample one assistant turn from the model in training or, for a frozen target, from its model.

        Args:
            messages: the conversation, in OpenAI's format.
            tools: OpenAI tool definitions.
            tool_choice: `auto` or `none`. With `none`, tool calls are returned as text. Other values cannot be enforced
                on a sampled model; they are ignored with a warning.
            max_tokens: a tighter limit than the configured one.
            agent_name, target_tag, debug_model: as in `for_agent`.
            ignored: other sampling parameters. The model in training ignores them with a warning, because the run's
                settings apply; the endpoint of a frozen target receives them.

        Raises:
            WorkflowError: the messages are invalid, the chat template rejects them, or a frozen target has no model or
                a model that does not answer.
            ContextLengthError: the prompt is longer than configured, or leaves no room for an answer.
            CallLimitError: the episode made too many calls.
            EpisodeStopped: the workflow has caught `CallLimitError` several times.
            AgentMadness: the output is degenerate and the configuration ends the episode.
        """
        await self._check_call_limit()
        offered_tools = None if self._settings.disable_tools else tools
        trained = self._targets.trains(target_tag)
        call_fields: dict[str, Any] = {
            "agent_name": agent_name,
            "target_tag": target_tag,
            "tools_hash": tools_hash(offered_tools),
            "trained": trained,
            "start_time": timestamp(),
        }
        model = FrozenModel() if trained else self._targets.frozen_model(target_tag, debug_model)
        if not isinstance(model, FrozenModel):
            with self._track_open(call_fields, None):
                parsed = await call_debug_model(model, messages, offered_tools, tool_choice)
            return self._record_external(parsed, messages, call_fields)
        if model.base_url is not None:
            options = {**ignored, "tool_choice": tool_choice, "max_tokens": max_tokens}
            with self._track_open(call_fields, None):
                parsed = await call_endpoint(model, target_tag, normalise(messages), offered_tools, options)
            return self._record_external(parsed, messages, call_fields)
        _warn_ignored(tool_choice, ignored)
        return await self._sample(messages, offered_tools, tool_choice, max_tokens, call_fields)

    async def _sample(
        self,
        messages: Sequence[Mapping[str, Any]],
        offered_tools: Sequence[Mapping[str, Any]] | None,
        tool_choice: str | None,
        max_tokens: int | None,
        call_fields: Mapping[str, Any],
    ) -> ChatAnswer:
        """Sample an answer from the model in training."""
        prompt = self._history.prompt(normalise(messages), offered_tools, call_fields["tools_hash"])
        params = self._sampling(prompt, max_tokens)
        with self._track_open(call_fields, len(prompt.token_ids)):
            completion = await self._engine.generate(prompt.token_ids, params)
        callable_tools = None if tool_choice == "none" else offered_tools
        parsed = self._codec.parse(completion.token_ids, prompt.token_ids, callable_tools)
        call = replace(
            self._call(prompt, completion),
            sampling=params,
            messages=(*prompt.messages, as_message(parsed)),
            **call_fields,
        )
        self._history.add(call, prompt.first_prompt_len)
        if self._on_call is not None:
            self._on_call(call)
        self._check_degenerate(completion, parsed)
        return ChatAnswer(parsed, call)

    @contextlib.contextmanager
    def _track_open(self, call_fields: Mapping[str, Any], prompt_tokens: int | None) -> Iterator[None]:
        call = OpenCall(call_fields["agent_name"], call_fields["target_tag"], call_fields["start_time"], prompt_tokens)
        self._open_calls[call] = None
        try:
            yield
        finally:
            del self._open_calls[call]

    def _record_external(
        self, parsed: ParsedAnswer, messages: Sequence[Mapping[str, Any]], call_fields: Mapping[str, Any]
    ) -> ChatAnswer:
        """Record the answer of an external model, whose tokens are unknown."""
        conversation = (*normalise(messages), as_message(parsed))
        empty = self._call(Prompt((), conversation), Completion((), (), "stop"))
        call = replace(empty, messages=conversation, **call_fields)
        self._history.calls.append(call)
        if self._on_call is not None:
            self._on_call(call)
        return ChatAnswer(parsed, call)

    def _call(self, prompt: Prompt, completion: Completion) -> LlmCall:
        """Return the record of a call that has just finished."""
        return LlmCall(
            call_id=f"{self._episode_id}/{len(self._history.calls)}",
            episode_id=self._episode_id,
            prompt_ids=prompt.token_ids,
            completion_ids=completion.token_ids,
            logprobs=completion.logprobs,
            finish_reason=completion.finish_reason,
            policy_version=completion.policy_version,
            fork=prompt.fork,
            end_time=timestamp(),
        )

    async def _check_call_limit(self) -> None:
        if self._calls_started < self._settings.max_calls:
            self._calls_started += 1
            return
        if self.call_limit_error is None:
            self.call_limit_error = CallLimitError(
                f"the episode started LLM call {self._calls_started + 1}, but rollout.multi_turn.max_steps is "
                f"{self._settings.max_calls}; raise it, or limit the agent's own loop"
            )
        self._rejected_calls += 1
        if self._rejected_calls <= _MAX_CALL_LIMIT_ERRORS:
            raise self.call_limit_error
        if self._rejected_calls > 2 * _MAX_CALL_LIMIT_ERRORS:
            # The workflow catches everything. Waiting lets the episode's deadline end it without using the processor.
            await asyncio.Event().wait()
        raise EpisodeStopped(str(self.call_limit_error))

    def _sampling(self, prompt: Prompt, max_tokens: int | None) -> SamplingParams:
        settings = self._settings
        length = len(prompt.token_ids)
        if prompt.first_prompt_len is None and length > settings.max_prompt_length:
            raise ContextLengthError(
                f"the first prompt has {length} tokens, but data.max_prompt_length is {settings.max_prompt_length}; "
                "raise data.max_prompt_length, or shorten the prompt"
            )
        first_prompt_len = length if prompt.first_prompt_len is None else prompt.first_prompt_len
        room = {
            "rollout.max_model_len": settings.max_model_len - length,
            "the model's context length": self._engine.max_model_len - length,
            "data.max_response_length": first_prompt_len + settings.max_response_length - length,
        }
        limit = min(room, key=lambda name: room[name])
        if room[limit] < 1:
            more = f"raise {limit}" if "." in limit else "use a model with a longer context"
            raise ContextLengthError(
                f"a prompt of {length} tokens leaves no room for an answer within {limit}; "
                f"{more}, or keep the agent's history shorter"
            )
        return SamplingParams(
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            max_tokens=min(room[limit], settings.max_tokens, max_tokens or settings.max_tokens),
            stop_token_ids=self._codec.stop_token_ids,
            seed=hash((self._seed, self._calls_started)) & 0x7FFFFFFFFFFFFFFF,
        )

    def _check_degenerate(self, completion: Completion, parsed: ParsedAnswer) -> None:
        if not self._settings.madness_checklist or self.degenerate_output is not None:
            return
        text = self._codec.tokenizer.decode(list(completion.token_ids))
        self.degenerate_output = find_degenerate_output(text, parsed, self._settings.madness_checklist)
        if self.degenerate_output is not None and self._settings.madness_ends_episode:
            raise AgentMadness(self.degenerate_output)


@dataclass(frozen=True, slots=True)
class AgentModel:
    """The model of one of several agents (see `ModelTuner.for_agent`)."""

    tuner: ModelTuner
    agent_name: str
    target_tag: str
    debug_model: DebugModel | None = None
    # AgentScope reads these two from a chat model.
    stream: bool = False
    model_name: str = "astuner"

    async def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | None = None,
        **kwargs: Any,
    ) -> ChatResponse:
        """Answer like an AgentScope chat model (see `ModelTuner.chat` for the errors)."""
        return await self.tuner(messages, tools, tool_choice, **self._identity(), **kwargs)

    async def chat(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> ChatAnswer:
        """Sample one assistant turn (see `ModelTuner.chat`)."""
        return await self.tuner.chat(messages, **self._identity(), **kwargs)

    def _identity(self) -> dict[str, Any]:
        return {"agent_name": self.agent_name, "target_tag": self.target_tag, "debug_model": self.debug_model}


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


_warned: set[str] = set()

# How often a workflow may catch the error of the call limit, for example once in each of its agents.
_MAX_CALL_LIMIT_ERRORS = 3


def _warn_ignored(tool_choice: str | None, ignored: Mapping[str, Any]) -> None:
    notes = [f"{name}={value!r}" for name, value in ignored.items() if value is not None]
    if tool_choice not in (None, "auto", "none"):
        notes.append(f"tool_choice={tool_choice!r}")
    for note in notes:
        name = note.partition("=")[0]
        if name not in _warned:
            _warned.add(name)
            logger.warning("the workflow passed {} to the model; astuner ignores it and uses the run's settings", note)
