"""Plays tasks of a verifiers environment. Executed by path with an interpreter that has the package `verifiers`.

verifiers itself drives an episode: its harness sends the conversation to the model's API. Here, the harness is a chat
loop in this process, and the model's API is a server in this process that hands each request to the caller, whose next
action is the model's answer.

Requests and answers are lines of JSON, on stdin and on the descriptor that is stdout at the start:

- `{"op": "load", "config": {...}, "limit": N}`: the environment's config, and the largest number of tasks to read. The
  answer has `tasks`, each with `id`, `prompt` and `system_prompt`.
- `{"op": "reset", "index": N}` and `{"op": "step", "content": "..." or None, "tool_calls": [...]}`: start a task, and
  answer as the model. The answer is a turn, `{"messages": [...], "tools": [...]}`, the messages that are new to the
  model, or the end, `{"reward": R, "rewards": {...}, "metrics": {...}, "errors": [...]}`.

The answer `{"error": "..."}` has the exception that a request raised.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
import traceback
import types
import uuid
from typing import Any

from aiohttp import web
from openai import AsyncOpenAI
from verifiers.v1 import (
    EvalClientConfig,
    Harness,
    HarnessConfig,
    ModelContext,
    ProgramResult,
    Sampling,
)
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.types import content_text
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

_HARNESS = "astuner_chat_loop"
_MODEL = "agent"


class ChatLoopConfig(HarnessConfig):
    """The harness has no settings."""


class ChatLoop(Harness[ChatLoopConfig]):
    """Sends the conversation to the model, and calls the tools that it asks for, until it answers without a call."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        **_: Any,
    ) -> ProgramResult:
        """Play a segment of a conversation."""
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message.model_dump(exclude_none=True) for message in prompt or ()]
            for message in messages:
                for call in message.get("tool_calls", ()):
                    call["function"] = {"name": call.pop("name"), "arguments": call.pop("arguments")}
        client = AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=None)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(client.close)
            servers = {name: {"url": url} for name, url in mcp_urls.items()}
            tools, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            while True:
                extra: dict[str, Any] = {"tools": tools} if tools else {}
                answer = await client.chat.completions.create(model=ctx.model, messages=messages, **extra)
                message = answer.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    return ProgramResult(exit_code=0, stdout="", stderr="")
                for call in message.tool_calls:
                    try:
                        arguments = json.loads(call.function.arguments)
                        content = await call_mcp(connections, dispatch, call.function.name, arguments)
                    except (ValueError, KeyError) as error:
                        content = f"invalid tool call: {error!r}; the tools are {', '.join(dispatch)}"
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


class Bridge:
    """The environment, and the episode that is being played."""

    def __init__(self) -> None:
        self._turns: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._answers: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._seen = 0
        self._episode: asyncio.Task[Any] | None = None
        self._stack = contextlib.AsyncExitStack()

    async def start(self) -> None:
        """Start the server that takes the place of the model."""
        app = web.Application(client_max_size=2**30)
        app.router.add_post("/v1/chat/completions", self._complete)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        client = EvalClientConfig(base_url=f"http://127.0.0.1:{port}/v1", api_key_var="ASTUNER_NO_KEY")
        self._context = ModelContext(model=_MODEL, client=client, sampling=Sampling())

    async def load(self, config: dict[str, Any], limit: int) -> dict[str, Any]:
        """Create the environment, and read its tasks."""
        seats = list(agent_config_fields(resolve_env_config(config)))
        if len(seats) != 1:
            raise ValueError(f"the environment has the agents {', '.join(seats)}; only those with one are supported")
        seat = {"runtime": {"type": "subprocess"}, **config.get(seats[0], {}), "harness": {"id": _HARNESS}}
        self._env = load_environment(resolve_env_config({**config, seats[0]: seat}))
        self._tasks = list(itertools.islice(self._env.taskset, limit))
        listed = []
        for task in self._tasks:
            data = task.data
            prompt = data.prompt if data.prompt is None or isinstance(data.prompt, str) else data.prompt_text
            name = data.id or data.name
            listed.append({"id": name, "prompt": prompt, "system_prompt": data.system_prompt})
        return {"tasks": listed}

    async def reset(self, index: int) -> dict[str, Any]:
        """Start a task, and return the first turn."""
        if self._episode is None:
            await self._stack.enter_async_context(self._env.serving())
        else:
            self._episode.cancel()
            await asyncio.gather(self._episode, return_exceptions=True)
        self._turns, self._answers, self._seen = asyncio.Queue(), asyncio.Queue(), 0
        (slot,) = self._env.slots(self._tasks[index])
        self._episode = asyncio.create_task(self._env.run_slot(slot, self._context))
        return await self._next()

    async def step(self, content: str | None, tool_calls: list[dict[str, Any]]) -> dict[str, Any]:
        """Answer as the model, and return the next turn, or the end."""
        calls = [
            {"id": uuid.uuid4().hex, "type": "function", "function": {"name": call["name"], "arguments": arguments}}
            for call in tool_calls
            for arguments in [json.dumps(call.get("arguments") or {})]
        ]
        await self._answers.put({"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})})
        return await self._next()

    async def close(self) -> None:
        """Cancel the episode, and stop the servers of the environment."""
        if self._episode is not None:
            self._episode.cancel()
            await asyncio.gather(self._episode, return_exceptions=True)
        await self._stack.aclose()

    async def _next(self) -> dict[str, Any]:
        assert self._episode is not None
        turn = asyncio.create_task(self._turns.get())
        await asyncio.wait([turn, self._episode], return_when=asyncio.FIRST_COMPLETED)
        if turn.done():
            return turn.result()
        turn.cancel()
        episode = self._episode.result()
        rewards = {name: reward.value for trace in episode.traces for name, reward in trace.rewards.items() if reward}
        errors = [error.message for source in (episode, *episode.traces) for error in source.errors]
        metrics = {name: value for trace in episode.traces for name, value in trace.metrics.items()}
        return {"reward": sum(rewards.values()), "rewards": rewards, "metrics": metrics, "errors": errors}

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        messages = body["messages"]
        new = [message for message in messages[self._seen :] if message["role"] != "assistant"]
        self._seen = len(messages)
        texts = []
        for message in new:
            content = message.get("content")
            parts = "\n".join(part.get("text", "") for part in content) if isinstance(content, list) else ""
            text = content_text(content if isinstance(content, str) else parts)
            texts.append({"role": message["role"], "text": text})
        await self._turns.put({"messages": texts, "tools": body.get("tools") or []})
        answer = await self._answers.get()
        choice = {"index": 0, "message": answer, "finish_reason": "tool_calls" if "tool_calls" in answer else "stop"}
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        completion = {"id": uuid.uuid4().hex, "object": "chat.completion", "created": 0, "model": _MODEL}
        return web.json_response({**completion, "choices": [choice], "usage": usage})


async def main() -> None:
    """Answer the requests on stdin."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # environments print
    module = types.ModuleType(_HARNESS)
    module.__all__, module.ChatLoop = ["ChatLoop"], ChatLoop  # type: ignore[attr-defined]
    sys.modules[_HARNESS] = module
    bridge = Bridge()
    await bridge.start()
    try:
        while line := await asyncio.to_thread(sys.stdin.readline):
            request = json.loads(line)
            try:
                answer = await getattr(bridge, request.pop("op"))(**request)
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=out, flush=True)
    finally:
        await bridge.close()


if __name__ == "__main__":
    asyncio.run(main())
