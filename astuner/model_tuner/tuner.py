"""ModelTuner: the model in training, as a workflow sees it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from loguru import logger

from astuner.errors import AgentMadness, CallLimitError, ContextLengthError
from astuner.llm_engine.protocol import LlmEngine
from astuner.model_tuner.codec import ChatCodec, ParsedAnswer
from astuner.model_tuner.history import History, Prompt
from astuner.model_tuner.madness import signs_of_madness
from astuner.model_tuner.messages import normalise, tools_hash
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


class ModelTuner:
    """The model in training, for one episode: hand it to an agent as its model.

    AgentScope agents take it as it is (`ReActAgent(model=model_tuner, …)`); anything else calls `chat`.
    Every call is recorded token-exactly in `calls`.
    """

    # AgentScope reads these two from a chat model.
    stream = False

    def __init__(
        self, engine: LlmEngine, codec: ChatCodec, settings: CallSettings, *, episode_id: str, seed: int = 0
    ) -> None:
        """Bind the tuner to one episode.

        Args:
            engine: samples tokens.
            codec: turns messages into ids and back.
            settings: sampling and lengths.
            episode_id: recorded with each call.
            seed: makes the episode's sampling repeatable.
        """
        self.model_name = "astuner"
        self.madness: str | None = None
        self._engine = engine
        self._codec = codec
        self._settings = settings
        self._episode_id = episode_id
        self._seed = seed
        self._history = History(codec)
        self._started = 0

    @property
    def calls(self) -> tuple[LlmCall, ...]:
        """The finished calls, in order of completion."""
        return tuple(self._history.calls)

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
        **ignored: Any,
    ) -> ChatAnswer:
        """Sample one assistant turn.

        Args:
            messages: the conversation, in OpenAI's form.
            tools: OpenAI tool definitions.
            tool_choice: `none` hides the tools' calls from the agent; anything but `auto` and `none` cannot
                be enforced on a sampled model, and is said once.
            max_tokens: a tighter bound than the configured one.
            agent_name: recorded with the call.
            ignored: sampling parameters of the workflow's own; the run's hold, which is said once.

        Raises:
            WorkflowError: the messages cannot be used, or the chat template does not take them.
            ContextLengthError: the prompt is longer than configured, or leaves no room for an answer.
            CallLimitError: the episode made too many calls.
            AgentMadness: the model lost control and the configuration ends the episode.
        """
        self._refuse_too_many_calls()
        _say_what_is_ignored(tool_choice, ignored)
        started = time.time()
        offered = None if self._settings.disable_tools else tools
        hashed = tools_hash(offered)
        prompt = self._history.prompt(normalise(messages), offered, hashed)
        params = self._sampling(prompt, max_tokens)
        completion = await self._engine.generate(prompt.token_ids, params)
        usable = None if tool_choice == "none" else offered
        parsed = self._codec.parse(completion.token_ids, prompt.token_ids, usable)
        call = replace(
            self._call(prompt, completion),
            sampling=params,
            agent_name=agent_name,
            tools_hash=hashed,
            messages=(*prompt.messages, as_message(parsed)),
            start_time=started,
        )
        self._history.add(call)
        self._watch(completion, parsed)
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
