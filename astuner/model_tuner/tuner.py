"""ModelTuner: the model in training, as a workflow sees it."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from loguru import logger

from astuner.errors import AgentMadness, CallLimitError, ContextLengthError
from astuner.llm_engine.protocol import LlmEngine
from astuner.model_tuner.codec import ChatCodec, ParsedAnswer
from astuner.model_tuner.history import History, Prompt
from astuner.model_tuner.madness import signs_of_madness
from astuner.model_tuner.messages import normalise, tools_hash
from astuner.model_tuner.targets import (
    DEFAULT_TARGET,
    DebugModel,
    FrozenModel,
    Targets,
    ask_debug_model,
    ask_endpoint,
)
from astuner.schema import Completion, LlmCall, SamplingParams

if TYPE_CHECKING:
    from agentscope.model import ChatResponse


@dataclass(frozen=True, slots=True)
class CallSettings:
    """What holds for every LLM call of an episode; lengths in tokens (`rollout` and `data` in the configuration)."""

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
    """An answer with the recorded call behind it."""

    parsed: ParsedAnswer
    call: LlmCall


@dataclass(frozen=True, slots=True, eq=False)
class OpenCall:
    """An LLM call that waits for its answer; `prompt_tokens` is None where another model is asked."""

    agent_name: str
    target_tag: str
    start_time: float
    prompt_tokens: int | None


class ModelTuner:
    """The model in training, for one episode: hand it to an agent as its model.

    AgentScope agents take it as it is (`ReActAgent(model=model_tuner, …)`); anything else calls `chat`.
    Every call is recorded token-exactly in `calls`.
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
    ) -> None:
        """Bind the tuner to one episode.

        Args:
            engine: samples tokens.
            codec: turns messages into ids and back.
            settings: sampling and lengths.
            episode_id: recorded with each call.
            seed: makes the episode's sampling repeatable.
            targets: which of the workflow's agents are trained; None for all.
        """
        self.model_name = "astuner"
        self.madness: str | None = None
        self._engine = engine
        self._codec = codec
        self._settings = settings
        self._episode_id = episode_id
        self._seed = seed
        self._targets = targets or Targets()
        self._history = History(codec)
        self._started = 0
        self._open: dict[OpenCall, None] = {}

    @property
    def open_calls(self) -> tuple[OpenCall, ...]:
        """The calls that wait for their answer; may be asked from any thread."""
        return tuple(self._open.copy())

    @property
    def calls(self) -> tuple[LlmCall, ...]:
        """The finished calls, in order of completion."""
        return tuple(self._history.calls)

    def for_agent(
        self, agent_name: str, target_tag: str = DEFAULT_TARGET, debug_model: DebugModel | None = None
    ) -> AgentModel:
        """Return the model for one of several agents: hand it to the agent as its model.

        Args:
            agent_name: recorded with the agent's calls; rewards by agent go by it.
            target_tag: what `rollout.trainable_targets` and `rollout.frozen_models` call it.
            debug_model: an AgentScope chat model that answers in its place where the target is not trained.
        """
        return AgentModel(self, agent_name, target_tag, debug_model)

    async def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | None = None,
        **kwargs: Any,
    ) -> ChatResponse:
        """Answer as an AgentScope chat model does (see `chat` for the errors)."""
        from astuner.model_tuner.agentscope_face import to_chat_response

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
        """Sample one assistant turn, of the model in training or, for a target that is not trained, of its stand-in.

        Args:
            messages: the conversation, in OpenAI's form.
            tools: OpenAI tool definitions.
            tool_choice: `none` hides the tools' calls from the agent; anything but `auto` and `none` cannot
                be enforced on a sampled model, and is said once.
            max_tokens: a tighter bound than the configured one.
            agent_name, target_tag, debug_model: as in `for_agent`.
            ignored: sampling parameters of the workflow's own. For the model in training the run's hold, which is said
                once; an endpoint that answers for a target that is not trained is given them.

        Raises:
            WorkflowError: the messages cannot be used, the chat template does not take them, or a target that is not
                trained has no model or one that does not answer.
            ContextLengthError: the prompt is longer than configured, or leaves no room for an answer.
            CallLimitError: the episode made too many calls.
            AgentMadness: the model lost control and the configuration ends the episode.
        """
        self._refuse_too_many_calls()
        offered = None if self._settings.disable_tools else tools
        trained = self._targets.trains(target_tag)
        about: dict[str, Any] = {
            "agent_name": agent_name,
            "target_tag": target_tag,
            "tools_hash": tools_hash(offered),
            "trained": trained,
            "start_time": time.time(),
        }
        model = FrozenModel() if trained else self._targets.stand_in(target_tag, debug_model)
        if not isinstance(model, FrozenModel):
            with self._waiting(about, None):
                parsed = await ask_debug_model(model, messages, offered, tool_choice)
            return self._heard(parsed, messages, about)
        if model.base_url is not None:
            options = {**ignored, "tool_choice": tool_choice, "max_tokens": max_tokens}
            with self._waiting(about, None):
                parsed = await ask_endpoint(model, target_tag, normalise(messages), offered, options)
            return self._heard(parsed, messages, about)
        _say_what_is_ignored(tool_choice, ignored)
        return await self._sample(messages, offered, tool_choice, max_tokens, about)

    async def _sample(
        self,
        messages: Sequence[Mapping[str, Any]],
        offered: Sequence[Mapping[str, Any]] | None,
        tool_choice: str | None,
        max_tokens: int | None,
        about: Mapping[str, Any],
    ) -> ChatAnswer:
        """Have the model in training answer."""
        prompt = self._history.prompt(normalise(messages), offered, about["tools_hash"])
        params = self._sampling(prompt, max_tokens)
        with self._waiting(about, len(prompt.token_ids)):
            completion = await self._engine.generate(prompt.token_ids, params)
        usable = None if tool_choice == "none" else offered
        parsed = self._codec.parse(completion.token_ids, prompt.token_ids, usable)
        call = replace(
            self._call(prompt, completion),
            sampling=params,
            messages=(*prompt.messages, as_message(parsed)),
            **about,
        )
        self._history.add(call, prompt.opening)
        self._watch(completion, parsed)
        return ChatAnswer(parsed, call)

    @contextlib.contextmanager
    def _waiting(self, about: Mapping[str, Any], prompt_tokens: int | None) -> Iterator[None]:
        call = OpenCall(about["agent_name"], about["target_tag"], about["start_time"], prompt_tokens)
        self._open[call] = None
        try:
            yield
        finally:
            del self._open[call]

    def _heard(
        self, parsed: ParsedAnswer, messages: Sequence[Mapping[str, Any]], about: Mapping[str, Any]
    ) -> ChatAnswer:
        """Record the answer of a model whose tokens are not known."""
        said = (*normalise(messages), as_message(parsed))
        call = replace(self._call(Prompt((), said), Completion((), (), "stop")), messages=said, **about)
        self._history.calls.append(call)
        return ChatAnswer(parsed, call)

    def _call(self, prompt: Prompt, completion: Completion) -> LlmCall:
        """Return the record of a call that has just ended."""
        return LlmCall(
            call_id=f"{self._episode_id}/{len(self._history.calls)}",
            episode_id=self._episode_id,
            prompt_ids=prompt.token_ids,
            completion_ids=completion.token_ids,
            logprobs=completion.logprobs,
            finish_reason=completion.finish_reason,
            policy_version=completion.policy_version,
            fork=prompt.fork,
            end_time=time.time(),
        )

    def _refuse_too_many_calls(self) -> None:
        if self._started >= self._settings.max_calls:
            raise CallLimitError(
                f"the episode asked for LLM call {self._started + 1}, but rollout.multi_turn.max_steps "
                f"is {self._settings.max_calls}; raise it or bound the agent's own loop"
            )
        self._started += 1

    def _sampling(self, prompt: Prompt, max_tokens: int | None) -> SamplingParams:
        settings = self._settings
        length = len(prompt.token_ids)
        if prompt.opening is None and length > settings.max_prompt_length:
            raise ContextLengthError(
                f"the first prompt has {length} tokens, data.max_prompt_length is {settings.max_prompt_length}; "
                "raise that, or shorten the prompt"
            )
        opening = length if prompt.opening is None else prompt.opening
        room = {
            "rollout.max_model_len": settings.max_model_len - length,
            "the model's own context": self._engine.max_model_len - length,
            "data.max_response_length": opening + settings.max_response_length - length,
        }
        tightest = min(room, key=lambda name: room[name])
        if room[tightest] < 1:
            raise ContextLengthError(
                f"a prompt of {length} tokens leaves no room for an answer within {tightest}; "
                "raise it, or keep the agent's history shorter"
            )
        return SamplingParams(
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            max_tokens=min(room[tightest], settings.max_tokens, max_tokens or settings.max_tokens),
            stop_token_ids=self._codec.stop_token_ids,
            seed=hash((self._seed, self._started)) & 0x7FFFFFFFFFFFFFFF,
        )

    def _watch(self, completion: Completion, parsed: ParsedAnswer) -> None:
        if not self._settings.madness_checklist or self.madness is not None:
            return
        text = self._codec.tokenizer.decode(list(completion.token_ids))
        self.madness = signs_of_madness(text, parsed, self._settings.madness_checklist)
        if self.madness is not None and self._settings.madness_ends_episode:
            raise AgentMadness(self.madness)


@dataclass(frozen=True, slots=True)
class AgentModel:
    """The model as one of a workflow's agents sees it, see `ModelTuner.for_agent`."""

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
        """Answer as an AgentScope chat model does (see `ModelTuner.chat` for the errors)."""
        return await self.tuner(messages, tools, tool_choice, **self._about(), **kwargs)

    async def chat(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> ChatAnswer:
        """Sample one assistant turn, see `ModelTuner.chat`."""
        return await self.tuner.chat(messages, **self._about(), **kwargs)

    def _about(self) -> dict[str, Any]:
        return {"agent_name": self.agent_name, "target_tag": self.target_tag, "debug_model": self.debug_model}


def as_message(parsed: ParsedAnswer) -> dict[str, Any]:
    """Return an answer as a message in OpenAI's form."""
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


_said: set[str] = set()


def _say_what_is_ignored(tool_choice: str | None, ignored: Mapping[str, Any]) -> None:
    notes = [f"{name}={value!r}" for name, value in ignored.items() if value is not None]
    if tool_choice not in (None, "auto", "none"):
        notes.append(f"tool_choice={tool_choice!r}")
    for note in notes:
        name = note.partition("=")[0]
        if name not in _said:
            _said.add(name)
            logger.warning("the workflow asked the model for {}, which is ignored: the run's settings hold", note)
