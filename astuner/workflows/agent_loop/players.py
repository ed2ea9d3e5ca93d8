"""The players of an environment's seats."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from astuner.errors import WorkflowError
from astuner.model_tuner import AgentModel
from astuner.plugin import load_class
from astuner.schema import Action, Observation
from astuner.workflows.agent_loop.actions import ActionReader
from astuner.workflows.agent_loop.histories import HistoryManager


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
    """A model, with its history.

    Attributes:
        model: the model.
        history: what it sees of the earlier turns.
        reader: reads the actions of its answers.
    """

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
        """Create the player of a seat in an episode; `seed` is that of the episode."""
        self.seat = seat
        self.rng = random.Random(f"{seed}/{seat}")

    @abstractmethod
    async def act(self, observation: Observation) -> Action:
        """Return the action after an observation."""


class RandomPlayer(ScriptedPlayer):
    """Chooses each legal action with the same probability."""

    async def act(self, observation: Observation) -> Action:
        """Return a legal action.

        Raises:
            WorkflowError: the environment does not list the legal actions.
        """
        if not observation.legal_actions:
            raise WorkflowError(
                f"rollout.players.{self.seat} is random, and the environment does not list the legal actions of this "
                "observation; write `package.module->Class` of a player that knows the actions"
            )
        return self.rng.choice(observation.legal_actions)


def load_player(path: str, *, search: Sequence[Path] = ()) -> type[ScriptedPlayer]:
    """Return a class of players: `random`, or `package.module->Class`.

    Raises:
        PluginError: the class cannot be loaded.
    """
    if path == "random":
        return RandomPlayer
    return load_class(path, ScriptedPlayer, search=search)  # type: ignore[type-abstract]
