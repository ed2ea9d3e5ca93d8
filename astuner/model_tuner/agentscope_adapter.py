"""The model as AgentScope 1.x calls it, and answers as AgentScope's types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from loguru import logger
from pydantic import ValidationError

from astuner.errors import UnsupportedParameterError

if TYPE_CHECKING:
    from agentscope.model import ChatResponse
    from pydantic import BaseModel

    from astuner.model_tuner.answers import ChatAnswer
    from astuner.model_tuner.tuner import ModelTuner

_warned: set[str] = set()


async def answer_agentscope(
    tuner: ModelTuner,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str | None,
    structured_model: type[BaseModel] | None,
    parameters: Mapping[str, Any],
) -> ChatResponse:
    """Answer like an AgentScope chat model.

    AgentScope's agents set `tool_choice` and `structured_model` themselves, and also work if they have no effect. Like
    AgentScope's models, this function therefore leaves out one that cannot be enforced, and logs a warning.

    Args:
        tuner: the model.
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
    return _to_chat_response(answer, structured_model)


def _to_chat_response(answer: ChatAnswer, structured_model: type[BaseModel] | None) -> ChatResponse:
    """Return the answer as AgentScope's `ChatResponse`: a list of thinking, text and tool-use blocks."""
    from agentscope.message import TextBlock, ThinkingBlock, ToolUseBlock
    from agentscope.model import ChatResponse

    parsed, call = answer.parsed, answer.call
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
    return ChatResponse(content=blocks, id=call.call_id, metadata=metadata)
