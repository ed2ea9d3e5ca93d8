"""The model of one agent among several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentscope.model import ChatResponse
    from pydantic import BaseModel

    from astuner.model_tuner.answers import ChatAnswer
    from astuner.model_tuner.targets import DebugModel
    from astuner.model_tuner.tuner import ModelTuner


@dataclass(frozen=True, slots=True)
class AgentModel:
    """The model of one agent among several (see `ModelTuner.for_agent`)."""

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
        structured_model: type[BaseModel] | None = None,
        **kwargs: Any,
    ) -> ChatResponse:
        """Answer like an AgentScope chat model (see `answer_agentscope`)."""
        return await self.tuner(messages, tools, tool_choice, structured_model, **self._identity(), **kwargs)

    async def chat(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> ChatAnswer:
        """Sample one assistant turn (see `ModelTuner.chat`)."""
        return await self.tuner.chat(messages, **self._identity(), **kwargs)

    def _identity(self) -> dict[str, Any]:
        return {"agent_name": self.agent_name, "target_tag": self.target_tag, "debug_model": self.debug_model}
