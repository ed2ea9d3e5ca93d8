"""The model as a chat model of AgentScope 1.x."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from agentscope.model import ChatModelBase, ChatResponse

if TYPE_CHECKING:
    from astuner.model_tuner.agent_model import AgentModel


class AgentScopeModel(ChatModelBase):
    """Answers the calls from AgentScope's agents with one agent's model.

    `stream` is False. If it is set to True, the answer comes as a stream of one part.
    """

    def __init__(self, model: AgentModel) -> None:
        """Answer with this model."""
        super().__init__(model.model_name, stream=False)
        self._model = model

    async def __call__(self, *args: Any, **kwargs: Any) -> ChatResponse | AsyncGenerator[ChatResponse, None]:
        """Answer messages (see `AgentModel.__call__`)."""
        response = await self._model(*args, **kwargs)
        return _stream(response) if self.stream else response


async def _stream(response: ChatResponse) -> AsyncGenerator[ChatResponse, None]:
    yield response
