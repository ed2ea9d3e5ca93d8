"""The scripted episode's agent in every framework; each imports its framework when it is called."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from openai.lib.streaming.chat import ChatCompletionStreamState

from astuner import ModelTuner
from tests.frameworks.episode import ADD, QUESTIONS, SYSTEM, add

AGENTSCOPE2_PYTHON = Path(os.environ.get("ASTUNER_FRAMEWORKS", os.devnull)) / "agentscope2/bin/python"
"""The interpreter of the environment with AgentScope 2, which `.ci/frameworks` makes."""


async def chat(model_tuner: ModelTuner) -> None:
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        while True:
            answer = await model_tuner.chat(messages, tools=[ADD])
            messages.append(answer.call.messages[-1])
            for call in answer.parsed.tool_calls:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": add(**call.arguments)})
            if not answer.parsed.tool_calls:
                break


async def openai_sdk(model_tuner: ModelTuner, client: Any = None) -> None:
    client = client or model_tuner.as_raw_openai_sdk_client()
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        while True:
            answer = await client.chat.completions.create(model="astuner", messages=messages, tools=[ADD])
            if not follow(messages, answer.choices[0].message):
                break


async def openai_sdk_sync(model_tuner: ModelTuner) -> None:
    client = model_tuner.as_oai_sdk_model(sync=True)
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        while True:
            answer = client.chat.completions.create(model="astuner", messages=messages, tools=[ADD])  # type: ignore[list-item]
            if not follow(messages, answer.choices[0].message):
                break


async def openai_sdk_streamed(model_tuner: ModelTuner, client: Any = None) -> None:
    client = client or model_tuner.as_raw_openai_sdk_client()
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        while True:
            state = ChatCompletionStreamState()
            async for chunk in await client.chat.completions.create(
                model="astuner", messages=messages, tools=[ADD], stream=True, stream_options={"include_usage": True}
            ):
                state.handle_chunk(chunk)
            if not follow(messages, state.current_completion_snapshot.choices[0].message):
                break


def follow(messages: list[Any], message: Any) -> bool:
    """Append an answer and the results of its tool calls; return whether it has any."""
    messages.append(message.model_dump(exclude_unset=True))
    for call in message.tool_calls or ():
        result = add(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return bool(message.tool_calls)


async def agentscope(model_tuner: ModelTuner, model: Any = None) -> None:
    from agentscope.agent import ReActAgent
    from agentscope.formatter import OpenAIChatFormatter
    from agentscope.message import Msg, TextBlock
    from agentscope.tool import Toolkit, ToolResponse

    def added(a: int, b: int) -> ToolResponse:
        return ToolResponse(content=[TextBlock(type="text", text=add(a, b))])

    toolkit = Toolkit()
    added.__name__ = "add"
    toolkit.register_tool_function(added, json_schema=ADD)  # type: ignore[arg-type]
    agent = ReActAgent(
        name="adder",
        sys_prompt=SYSTEM,
        model=model or model_tuner.as_agentscope_model(),
        formatter=OpenAIChatFormatter(),
        toolkit=toolkit,
    )
    agent.set_console_output_enabled(False)
    for question in QUESTIONS:
        await agent.reply(Msg("user", question, role="user"))


async def agentscope_tuner(model_tuner: ModelTuner) -> None:
    await agentscope(model_tuner, model_tuner)


async def langgraph(model_tuner: ModelTuner) -> None:
    from langchain_core.tools import StructuredTool
    from langgraph.prebuilt import create_react_agent

    tool = StructuredTool.from_function(
        add, name="add", description="Add two numbers.", args_schema=ADD["function"]["parameters"]
    )
    agent = create_react_agent(model_tuner.as_langchain_chat_model(), [tool], prompt=SYSTEM)
    state: Any = {"messages": []}
    for question in QUESTIONS:
        state = await agent.ainvoke({"messages": [*state["messages"], {"role": "user", "content": question}]})


async def autogen(model_tuner: ModelTuner) -> None:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_core.tools import FunctionTool

    class Add(FunctionTool):
        @property
        def schema(self) -> Any:
            return ADD["function"]

    agent = AssistantAgent(
        "adder",
        model_tuner.as_autogen_model_client(),
        tools=[Add(add, "Add two numbers.")],
        system_message=SYSTEM,
        max_tool_iterations=5,
    )
    for question in QUESTIONS:
        await agent.run(task=question)


async def openai_agents(model_tuner: ModelTuner, model: Any = None) -> None:
    from agents import Agent, FunctionTool, Runner, set_tracing_disabled

    set_tracing_disabled(True)

    async def call(context: Any, arguments: str) -> str:
        return add(**json.loads(arguments))

    function = ADD["function"]
    tool = FunctionTool("add", function["description"], function["parameters"], call, strict_json_schema=False)
    agent = Agent("adder", instructions=SYSTEM, tools=[tool], model=model or model_tuner.as_openai_agents_model())
    history: list[Any] = []
    for question in QUESTIONS:
        result = await Runner.run(agent, [*history, {"role": "user", "content": question}])
        history = result.to_input_list()


async def openai_agents_responses(model_tuner: ModelTuner) -> None:
    await agents_with_responses(model_tuner, model_tuner.as_raw_openai_sdk_client())


async def openai_agents_gateway(model_tuner: ModelTuner) -> None:
    async with gateway_client(model_tuner) as client:
        await agents_with_responses(model_tuner, client)


async def agents_with_responses(model_tuner: ModelTuner, client: Any) -> None:
    from agents import ModelBehaviorError, OpenAIResponsesModel

    # The SDK raises this for an answer that is cut, as the last one is.
    with contextlib.suppress(ModelBehaviorError):
        await openai_agents(model_tuner, OpenAIResponsesModel("astuner", client))


async def openai_responses(model_tuner: ModelTuner) -> None:
    client = model_tuner.as_raw_openai_sdk_client()
    tool: Any = {"type": "function", **ADD["function"], "strict": False}
    items: list[Any] = []
    for question in QUESTIONS:
        items.append({"role": "user", "content": question})
        while True:
            answer = await client.responses.create(model="astuner", instructions=SYSTEM, input=items, tools=[tool])
            items += [item.model_dump(exclude_unset=True) for item in answer.output]
            calls = [item for item in answer.output if item.type == "function_call"]
            for call in calls:
                result = add(**json.loads(call.arguments))
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
            if not calls:
                break


async def pydantic_ai(model_tuner: ModelTuner) -> None:
    from pydantic_ai import Agent, Tool
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    function = ADD["function"]
    model = OpenAIChatModel("astuner", provider=OpenAIProvider(openai_client=model_tuner.as_raw_openai_sdk_client()))
    tool = Tool.from_schema(add, "add", function["description"], function["parameters"])
    tool.strict = False  # pydantic-ai would change the schema
    agent = Agent(model, instructions=SYSTEM, tools=[tool])
    history: Any = None
    for question in QUESTIONS:
        result = await agent.run(question, message_history=history)
        history = result.all_messages()


async def openai_gateway(model_tuner: ModelTuner) -> None:
    async with gateway_client(model_tuner) as client:
        await openai_sdk(model_tuner, client)


async def openai_gateway_streamed(model_tuner: ModelTuner) -> None:
    async with gateway_client(model_tuner) as client:
        await openai_sdk_streamed(model_tuner, client)


def gateway_client(model_tuner: ModelTuner) -> Any:
    from openai import AsyncOpenAI

    base_url, api_key = model_tuner.as_oai_baseurl_apikey()
    return AsyncOpenAI(base_url=base_url, api_key=api_key)


async def google_adk(model_tuner: ModelTuner) -> None:
    from google.adk.agents import LlmAgent
    from google.adk.models.lite_llm import LiteLlm
    from google.adk.runners import InMemoryRunner
    from google.genai.types import Content, Part

    base_url, api_key = model_tuner.as_oai_baseurl_apikey()
    model = LiteLlm(model="openai/astuner", api_base=base_url, api_key=api_key)
    agent = LlmAgent(name="adder", model=model, instruction=SYSTEM, tools=[add])
    runner = InMemoryRunner(agent, app_name="sums")
    session = await runner.session_service.create_session(app_name="sums", user_id="user")
    for question in QUESTIONS:
        content = Content(role="user", parts=[Part(text=question)])
        async for _ in runner.run_async(user_id="user", session_id=session.id, new_message=content):
            pass


async def smolagents(model_tuner: ModelTuner) -> None:
    import asyncio

    from smolagents import CodeAgent, OpenAIModel, tool

    base_url, api_key = model_tuner.as_oai_baseurl_apikey()
    agent = CodeAgent(
        tools=[tool(add)], model=OpenAIModel("astuner", base_url, api_key), max_steps=3, verbosity_level=0
    )
    await asyncio.to_thread(agent.run, QUESTIONS[0])


async def agentscope2(model_tuner: ModelTuner, *, stream: bool = False) -> None:
    """Run the agent in AgentScope 2's own environment."""
    import asyncio

    base_url, api_key = model_tuner.as_oai_baseurl_apikey()
    arguments = json.dumps([SYSTEM, QUESTIONS, ADD["function"], stream])
    process = await asyncio.create_subprocess_exec(
        str(AGENTSCOPE2_PYTHON),
        str(Path(__file__).with_name("agentscope2_agent.py")),
        arguments,
        env={**os.environ, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "PYTHONPATH": ""},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()


async def agentscope2_streamed(model_tuner: ModelTuner) -> None:
    await agentscope2(model_tuner, stream=True)
