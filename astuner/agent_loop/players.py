"""The players of an environment's seats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from astuner.agent_loop.actions import ActionReader
from astuner.agent_loop.histories import HistoryManager
from astuner.model_tuner import AgentModel
from astuner.schema import Action, Observation


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
