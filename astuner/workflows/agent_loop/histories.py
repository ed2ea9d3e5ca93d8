"""History managers: which part of its history an agent's model sees (see `context_tracker.context_tracker_type`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from astuner.config.workflow import SUMMARY_TARGET, ContextTrackerConfig
from astuner.model_tuner.answers import ChatAnswer
from astuner.model_tuner.framework_adapters import AgentModel
from astuner.model_tuner.history import HistoryEdit
from astuner.schema import ForkCause, LlmCall, Message


@dataclass(frozen=True, slots=True)
class Turn:
    """An observation and the model's answer to it."""

    observation: str
    answer: Message


@dataclass(frozen=True, slots=True)
class NextRequest:
    """The messages of the next call, and how the history was changed since the last one."""

    messages: Sequence[Message]
    edit: HistoryEdit | None = None


@dataclass(eq=False)
class HistoryManager(ABC):
    """The history of one agent in one episode.

    Attributes:
        tools: the tools that the model is shown.
        init_messages: the messages before the instruction.
        instruction: precedes the first observation that the model sees.
        turns: the turns that the model still sees.
    """

    model: AgentModel
    tools: Sequence[Mapping[str, Any]] | None
    init_messages: Sequence[Message]
    instruction: str
    turns: list[Turn] = field(default_factory=list, init=False)
    last_call: LlmCall | None = field(default=None, init=False)

    @abstractmethod
    async def request(self, observation: str) -> NextRequest:
        """Return the request for the answer to an observation."""

    def add(self, observation: str, answer: ChatAnswer) -> None:
        """Add a turn."""
        self.turns.append(Turn(observation, answer.call.messages[-1]))
        self.last_call = answer.call

    def messages(self, observation: str) -> list[Message]:
        """Return the instruction, the turns, and an observation that has no answer yet."""
        result = [*self.init_messages]
        previous: Message = {}
        for index, (text, answer) in enumerate([*((t.observation, t.answer) for t in self.turns), (observation, {})]):
            if index == 0:
                # One message, because some chat templates reject two messages of the user in a row.
                result.append({"role": "user", "content": "\n\n".join(filter(None, (self.instruction, text)))})
            elif calls := previous.get("tool_calls"):
                result += [
                    {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": text}
                    for call in calls
                ]
            else:
                result.append({"role": "user", "content": text})
            if answer:
                result.append(answer)
            previous = answer
        return result

    def edited(self, cause: ForkCause, observation: str) -> NextRequest:
        """Return the request after a change of the history."""
        assert self.last_call is not None
        return NextRequest(self.messages(observation), HistoryEdit(cause, self.last_call))


class LinearHistory(HistoryManager):
    """`linear`: keeps all turns."""

    async def request(self, observation: str) -> NextRequest:
        """Return all turns."""
        return NextRequest(self.messages(observation))


@dataclass(eq=False)
class SlidingWindowHistory(HistoryManager):
    """`sliding_window`: keeps the last `max_turns` turns. The observation without an answer is not counted."""

    max_turns: int

    async def request(self, observation: str) -> NextRequest:
        """Leave out the oldest turns."""
        surplus = len(self.turns) - self.max_turns
        if surplus <= 0:
            return NextRequest(self.messages(observation))
        del self.turns[:surplus]
        return self.edited("window_moved", observation)


@dataclass(eq=False)
class LinearThinkHistory(HistoryManager):
    """`linear_think`: keeps all turns, but the thinking of the last `thinking_turns` answers only."""

    thinking_turns: int

    async def request(self, observation: str) -> NextRequest:
        """Leave out the thinking of older answers."""
        older = range(len(self.turns) - self.thinking_turns)
        with_thinking = [index for index in older if self.turns[index].answer.get("reasoning_content")]
        for index in with_thinking:
            answer = {key: value for key, value in self.turns[index].answer.items() if key != "reasoning_content"}
            self.turns[index] = replace(self.turns[index], answer=answer)
        return (
            self.edited("thinking_dropped", observation) if with_thinking else NextRequest(self.messages(observation))
        )


@dataclass(eq=False)
class AutoContextHistory(HistoryManager):
    """`auto_context`: replaces the turns with a summary once the prompt has more than `max_tokens` tokens.

    A summary has at most `summary_tokens` tokens. The last `keep_turns` turns remain after it. If it is `external`, the
    model of target `SUMMARY_TARGET` writes it, and not the agent's.
    """

    max_tokens: int
    summary_tokens: int
    keep_turns: int
    external: bool
    prompt: str

    async def request(self, observation: str) -> NextRequest:
        """Summarise the history if it is too long."""
        messages = self.messages(observation)
        surplus = len(self.turns) - self.keep_turns
        if surplus <= 0 or self.model.tuner.count_prompt_tokens(messages, self.tools) <= self.max_tokens:
            return NextRequest(messages)
        summary = (await self._summarise(messages)).parsed.content.strip()
        heading = "Summary of the steps so far:"
        self.instruction = f"{self.instruction.partition(heading)[0].rstrip()}\n\n{heading}\n{summary}".lstrip()
        del self.turns[:surplus]
        return self.edited("history_compressed", observation)

    async def _summarise(self, messages: Sequence[Message]) -> ChatAnswer:
        if self.external:
            # The other model need not know tools.
            transcript = "\n\n".join(f"{message['role']}: {_text(message)}" for message in messages)
            question = {"role": "user", "content": f"{transcript}\n\n{self.prompt}"}
            model = replace(self.model, target_tag=SUMMARY_TARGET, debug_model=None)
            return await model.chat([question], max_tokens=self.summary_tokens)
        last = messages[-1]
        # The request extends the last call, whose tokens are thus sampled and trained once.
        if last["role"] == "user":
            asked = [*messages[:-1], {**last, "content": f"{last['content']}\n\n{self.prompt}"}]
        else:
            asked = [*messages, {"role": "user", "content": self.prompt}]
        answer = await self.model.chat(
            asked,
            tools=self.tools,
            tool_choice="none" if self.tools else None,
            max_tokens=self.summary_tokens,
        )
        self.last_call = answer.call
        return answer


def make_history(
    config: ContextTrackerConfig,
    model: AgentModel,
    tools: Sequence[Mapping[str, Any]] | None,
    init_messages: Sequence[Message],
    instruction: str,
) -> HistoryManager:
    """Return the configured history manager for one agent (see `HistoryManager` for the arguments)."""
    common = (model, tools, init_messages, instruction)
    match config.context_tracker_type:
        case "linear":
            return LinearHistory(*common)
        case "sliding_window":
            return SlidingWindowHistory(*common, max_turns=config.sliding_window_cm.turns)
        case "linear_think":
            return LinearThinkHistory(*common, thinking_turns=config.linear_think_cm.keep_turns)
        case "auto_context":
            auto = config.auto_context_cm
            return AutoContextHistory(
                *common,
                max_tokens=config.max_env_len,
                summary_tokens=config.alien_llm_response_length,
                keep_turns=auto.keep_turns,
                external=auto.base_url is not None,
                prompt=auto.prompt,
            )


def _text(message: Message) -> str:
    calls = [f"{call['function']['name']}({call['function']['arguments']})" for call in message.get("tool_calls") or ()]
    return "\n".join(filter(None, (str(message.get("content") or ""), *calls)))
