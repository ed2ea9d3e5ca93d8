"""Conversion of answers to AgentScope's types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentscope.model import ChatResponse

    from astuner.model_tuner.tuner import ChatAnswer


def to_chat_response(answer: ChatAnswer) -> ChatResponse:
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
    return ChatResponse(content=blocks, id=call.call_id)
