"""The scripted episode's agent in AgentScope 2, which has a separate environment and reaches the model over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import sys

from agentscope.agent import Agent, InjectionConfig
from agentscope.credential import OpenAICredential
from agentscope.message import TextBlock, UserMsg
from agentscope.model import OpenAIChatModel
from agentscope.permission import PermissionBehavior, PermissionDecision
from agentscope.tool import FunctionTool, ToolChunk, Toolkit


async def add(a: int, b: int) -> ToolChunk:
    """Add two numbers."""
    return ToolChunk(content=[TextBlock(text=str(a + b))])


async def main() -> None:
    """Ask the questions; the argument is JSON with the system prompt, the questions and the tool's definition."""
    system, questions, function, stream = json.loads(sys.argv[1])
    credential = OpenAICredential(api_key=os.environ["OPENAI_API_KEY"], base_url=os.environ["OPENAI_BASE_URL"])
    tool = FunctionTool(
        add,
        description=function["description"],
        input_schema=function["parameters"],
        permission=PermissionDecision(behavior=PermissionBehavior.ALLOW, message=""),
    )
    agent = Agent(
        "adder",
        system,
        OpenAIChatModel(credential, "astuner", stream=stream),
        Toolkit([tool]),
        injection_config=InjectionConfig(inject_runtime_state=False),  # the time, which would differ between runs
    )
    for question in questions:
        await agent.reply(UserMsg("user", question))


asyncio.run(main())
