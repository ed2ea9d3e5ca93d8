"""The players of an environment's seats, and their actions' forms: what a model is told, and how it is read."""

from __future__ import annotations

import json
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from astuner.errors import WorkflowError, shorten
from astuner.model_tuner.codec import ParsedAnswer
from astuner.model_tuner.framework_adapters import AgentModel
from astuner.plugin import load_class
from astuner.schema import Action, Observation
from astuner.task_judge.math_text import last_boxed
from astuner.workflows.agent_loop.histories import HistoryManager

ActionForm = Literal["text", "box", "code", "tool_call", "json"]

_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[^\n`]*\n(.*?)^[ \t]*\1[ \t]*$", re.DOTALL | re.MULTILINE)
_OBJECT = re.compile(r"\{")
_TOOL_NAME = "act"
_TOOL = {
    "type": "function",
    "function": {
        "name": _TOOL_NAME,
        "description": "Perform an action in the environment.",
        "parameters": {
            "type": "object",
            "properties": {"action": {"type": "string", "description": "the action"}},
            "required": ["action"],
        },
    },
}


class UnreadableActionError(Exception):
    """An answer contains no action; the message tells the model what is missing."""


@dataclass(frozen=True, slots=True)
class ActionReader:
    """Reads actions of one form.

    Attributes:
        form: `text`: the whole answer. `box`: the content of the last `\\boxed{...}`. `code`: the content of the last
            fenced code block. `tool_call`: a tool call. `json`: the last JSON object, `{"action": "..."}` or a tool
            call `{"name": "...", "arguments": {...}}`.
        env_tools: the tools of the environment. Without them, the form `tool_call` has the tool `act(action)`.
    """

    form: ActionForm
    env_tools: Sequence[Mapping[str, Any]] = ()

    @property
    def tools(self) -> Sequence[Mapping[str, Any]] | None:
        """The tools that the model is shown; None if actions are no tool calls."""
        if self.form != "tool_call":
            return None
        return list(self.env_tools) or [_TOOL]

    @property
    def instruction(self) -> str:
        """What the model is told about the form; "" if there is nothing to say."""
        return _INSTRUCTIONS[self.form]

    def read(self, answer: ParsedAnswer) -> Action:
        """Return the action in an answer; `UnreadableActionError` if the answer contains no action of this form."""
        if self.form == "tool_call":
            return self._tool_call(answer)
        text = answer.content
        action: Action | None
        if self.form == "box":
            action = last_boxed(text)
        elif self.form == "code":
            blocks = _FENCE.findall(text)
            action = blocks[-1][1] if blocks else None
        elif self.form == "json":
            action = _json_action(text)
        else:
            action = text
        if isinstance(action, str):
            action = action.strip()
        if not action:
            raise UnreadableActionError(f"Your answer contains no action. {_EXPECTED[self.form]}")
        return action

    def _tool_call(self, answer: ParsedAnswer) -> Action:
        expected = _EXPECTED["tool_call"]
        if len(answer.tool_calls) > 1:
            raise UnreadableActionError(f"Your answer contains {len(answer.tool_calls)} tool calls. {expected}")
        if not answer.tool_calls:
            wrong = f"the malformed tool call {shorten(answer.malformed[0])}" if answer.malformed else "no tool call"
            raise UnreadableActionError(f"Your answer contains {wrong}. {expected}")
        call = answer.tool_calls[0]
        if self.env_tools:
            return {"name": call.name, "arguments": dict(call.arguments)}
        action = call.arguments.get("action")
        if call.name != _TOOL_NAME or not isinstance(action, str) or not action.strip():
            raise UnreadableActionError(
                f'Your tool call is not understood. Call the tool {_TOOL_NAME} with {{"action": "..."}}.'
            )
        return action.strip()


_INSTRUCTIONS: Mapping[ActionForm, str] = {
    "text": "",
    "box": "Write your action as \\boxed{action}.",
    "code": "Write your action as a fenced code block.",
    "tool_call": "",
    "json": 'Write your action as a JSON object, {"action": "..."}.',
}
_EXPECTED: Mapping[ActionForm, str] = {
    "text": "Write the action as the text of your answer.",
    "box": "Write exactly one action as \\boxed{action}.",
    "code": "Write the action as a fenced code block.",
    "tool_call": "Answer with exactly one tool call.",
    "json": 'Write the action as a JSON object, {"action": "..."}.',
}


def _json_action(text: str) -> Action | None:
    """Return the action of the last outermost JSON object that is an action; None if there is none."""
    decoder, action, position = json.JSONDecoder(), None, 0
    while (start := _OBJECT.search(text, position)) is not None:
        try:
            value, position = decoder.raw_decode(text, start.start())
        except (ValueError, RecursionError):
            position = start.end()
            continue
        if isinstance(value.get("action"), str):
            action = value["action"]
        elif isinstance(value.get("name"), str) and isinstance(value.get("arguments"), dict):
            action = {"name": value["name"], "arguments": value["arguments"]}
    return action


class Player(Protocol):
    """Plays one seat of an environment, in one episode."""

    async def act(self, observation: Observation) -> Action:
        """Return the action after an observation.

        Raises:
            UnreadableActionError: the player has answered, and its answer contains no action. The seat acts again; the
                next observation begins with the error's message.
        """


@dataclass(eq=False)
class ModelPlayer:
    """A model, with what it sees of the earlier turns."""

    model: AgentModel
    history: HistoryManager
    reader: ActionReader

    async def act(self, observation: Observation) -> Action:
        """Return the model's action.

        Raises:
            UnreadableActionError: the answer contains no action.
            EpisodeError: the model gives no answer (see `ModelTuner.chat`).
        """
        request = await self.history.request(observation.text)
        answer = await self.model.chat(request.messages, tools=self.reader.tools, history_edit=request.edit)
        self.history.add(observation.text, answer)
        return self.reader.read(answer.parsed)


class ScriptedPlayer(ABC):
    """Base class of players that are programs (see `rollout.players`). Each seat of each episode has its own object.

    Attributes:
        seat: the seat that it plays.
        rng: the player's random numbers, which depend only on the seat and the episode's seed.
    """

    def __init__(self, seat: str, seed: int) -> None:
        """Create the player of a seat, with the episode's `seed`."""
        self.seat = seat
        self.rng = random.Random(f"{seed}/{seat}")

    @abstractmethod
    async def act(self, observation: Observation) -> Action:
        """Return the action after an observation."""


class RandomPlayer(ScriptedPlayer):
    """Chooses each legal action with the same probability."""

    async def act(self, observation: Observation) -> Action:
        """Return a legal action; `WorkflowError` if the environment does not list them."""
        if not observation.legal_actions:
            raise WorkflowError(
                f"rollout.players.{self.seat} is random, and the environment does not list the legal actions of this "
                "observation; write `package.module->Class` of a player that knows the actions"
            )
        return self.rng.choice(observation.legal_actions)


def load_player(path: str, *, search: Sequence[Path] = ()) -> type[ScriptedPlayer]:
    """Return a class of players: `random`, or `package.module->Class`; `PluginError` if the class cannot be loaded."""
    if path == "random":
        return RandomPlayer
    return load_class(path, ScriptedPlayer, search=search)  # type: ignore[type-abstract]
