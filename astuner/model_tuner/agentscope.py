"""The model as AgentScope 1.x calls it: its chat model, and answers as its types."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any

from agentscope.message import TextBlock, ThinkingBlock, ToolUseBlock
from agentscope.model import ChatModelBase, ChatResponse
from loguru import logger
from pydantic import BaseModel, ValidationError

from astuner.errors import UnsupportedParameterError
from astuner.schema import Messages, Tools

if TYPE_CHECKING:
    from astuner.model_tuner.framework_adapters import AgentModel
    from astuner.model_tuner.tuner import ModelTuner

_warned: set[str] = set()


class AgentScopeModel(ChatModelBase):
    """Answers the calls from AgentScope's agents with one agent's model.

    `stream` is False. If it is set to True, the answer comes as a stream of one part.
    """

    def __init__(self, model: AgentModel) -> None:
        super().__init__(model.model_name, stream=False)
        self._model = model

    async def __call__(self, *args: Any, **kwargs: Any) -> ChatResponse | AsyncGenerator[ChatResponse, None]:
        """Answer messages (see `AgentModel.__call__`)."""
        response = await self._model(*args, **kwargs)

        async def stream() -> AsyncGenerator[ChatResponse, None]:
            yield response

        return stream() if self.stream else response


async def answer_agentscope(
    tuner: ModelTuner,
    messages: Messages,
    tools: Tools | None,
    tool_choice: str | None,
    structured_model: type[BaseModel] | None,
    parameters: Mapping[str, Any],
) -> ChatResponse:
    """Answer like an AgentScope chat model.

    AgentScope's agents set `tool_choice` and `structured_model` themselves, and also work if they have no effect. Like
    AgentScope's models, this function therefore leaves out one that cannot be enforced, and logs a warning.

    Args:
        messages: the conversation, in OpenAI's format.
        tools: OpenAI tool definitions.
        tool_choice: `auto`, `none`, `required` or the name of a tool.
        structured_model: a pydantic class. The answer is JSON of its schema, and the response's `metadata` has its
            fields; tools are not offered. If the answer does not fit the class, the metadata is None.
        parameters: further arguments of `ModelTuner.chat`.

    Raises:
        UnsupportedParameterError and other errors: as `ModelTuner.chat`.
    """
    demands: dict[str, Any] = {"tool_choice": "required" if tool_choice == "any" else tool_choice}
    if tool_choice not in (None, "auto", "none", "any", "required"):
        demands["tool_choice"] = {"type": "function", "function": {"name": tool_choice}}
    if structured_model is not None:
        schema = {"additionalProperties": False, **structured_model.model_json_schema()}
        named = {"name": structured_model.__name__, "schema": schema}
        demands = {"response_format": {"type": "json_schema", "json_schema": named}}
        tools = None
    try:
        answer = await tuner.chat(messages, tools=tools, **demands, **parameters)
    except UnsupportedParameterError as error:
        if error.name not in demands:
            raise
        if error.name not in _warned:
            _warned.add(error.name)
            logger.warning("the agent's {} is left out: {}", error.name, error)
        answer = await tuner.chat(messages, tools=tools, **parameters)
    parsed = answer.parsed
    blocks: list[Any] = []
    if parsed.reasoning:
        blocks.append(ThinkingBlock(type="thinking", thinking=parsed.reasoning))
    if parsed.content:
        blocks.append(TextBlock(type="text", text=parsed.content))
    blocks.extend(
        ToolUseBlock(type="tool_use", id=tool.id, name=tool.name, input=dict(tool.arguments))
        for tool in parsed.tool_calls
    )
    metadata = None
    if structured_model is not None:
        try:
            metadata = structured_model.model_validate_json(parsed.content).model_dump()
        except ValidationError:
            logger.debug("an answer is not a valid {}", structured_model.__name__)
    return ChatResponse(content=blocks, id=answer.call.call_id, metadata=metadata)
