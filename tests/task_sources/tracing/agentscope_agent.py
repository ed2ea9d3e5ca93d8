"""An AgentScope agent with a tool and a scripted model, with AgentScope's own tracing: the program of the tests.

Argument: the address to which the spans are sent.
"""

import asyncio
import sys
from collections.abc import Mapping
from typing import Any

import agentscope
from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.memory import InMemoryMemory
from agentscope.message import Msg, TextBlock, ToolUseBlock
from agentscope.model import ChatModelBase, ChatResponse
from agentscope.tool import Toolkit, ToolResponse
from agentscope.tracing import trace_llm


def multiply(a: int, b: int) -> ToolResponse:
    """Multiply two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return ToolResponse([TextBlock(type="text", text=str(a * b))])


class Scripted(ChatModelBase):
    def __init__(self) -> None:
        super().__init__("scripted-model", stream=False)

    @trace_llm
    async def __call__(self, messages: list[Mapping[str, Any]], **kwargs: Any) -> ChatResponse:
        if messages[-1]["role"] == "user":
            call = ToolUseBlock(type="tool_use", id="call-1", name="multiply", input={"a": 6, "b": 7})
            return ChatResponse([call])
        return ChatResponse([TextBlock(type="text", text=f"The result is {messages[-1]['content']}.")])


async def main() -> None:
    agentscope.init(project="shop", tracing_url=sys.argv[1])
    toolkit = Toolkit()
    toolkit.register_tool_function(multiply)
    agent = ReActAgent(
        "friday", "You compute.", Scripted(), OpenAIChatFormatter(), toolkit=toolkit, memory=InMemoryMemory()
    )
    await agent(Msg("user", "What is 6 times 7?", "user"))
    from opentelemetry import trace

    trace.get_tracer_provider().shutdown()  # sends the spans that are left


asyncio.run(main())
