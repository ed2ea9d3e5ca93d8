"""MCP servers as environments: the agent's actions are calls of the server's tools (https://modelcontextprotocol.io)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import jsonschema
from anyio.from_thread import start_blocking_portal
from mcp import ClientSession, McpError, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CallToolResult, TextContent

from astuner.env_service.environment import Environment, tool_schema
from astuner.errors import EnvError, describe_error, short_repr, shorten
from astuner.schema import Action, Evaluation, Observation, StepResult, TaskProfile

_QUESTION_FIELDS = ("main_query", "question", "instruction")
_ID_FIELDS = ("task_id", "id")


class McpEnvironment(Environment):
    """The tools of an MCP server. Each instance has its own server process, or its own session over HTTP.

    An action is a tool call `{"name": ..., "arguments": {...}}`, also as JSON text. Any other text is the final answer
    and ends the task.

    Args:
        tasks: by split, the path of a .jsonl file. A row has the instruction in `main_query`, `question` or
            `instruction`, optionally an id in `task_id` or `id`, and further fields.
        command: starts a server that speaks over its standard input and output.
        url: address of a server with streamable HTTP, in place of `command`.
        env: environment variables of `command`.
        headers: sent with each request to `url`.
        reset_tool: a tool that starts a task. It and `score_tool` get the fields of the task's row and `seed`, as
            far as they have parameters with these names, and are not shown to the agent.
        score_tool: a tool that returns the score. It also gets `answer`, the final answer. Without it, a task judge
            has to score the episode.
        timeout: seconds that the start of the server and each call may take.

    Raises:
        EnvError: neither or both of `command` and `url` are given, or a task file cannot be read.
    """

    def __init__(
        self,
        name: str,
        tasks: Mapping[str, str],
        command: Sequence[str] | None = None,
        url: str | None = None,
        env: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        reset_tool: str | None = None,
        score_tool: str | None = None,
        timeout: float = 60.0,
    ) -> None:
        if (command is None) == (url is None):
            raise EnvError(f"the environment mcp/{name} needs either `command` or `url` in its parameters")
        self._name, self._command, self._url = name, command, url
        self._env, self._headers, self._timeout = dict(env or {}), dict(headers or {}), timeout
        self._hidden = {"reset_tool": reset_tool, "score_tool": score_tool}
        self._tasks = {split: _read_tasks(name, Path(path)) for split, path in tasks.items()}
        self._stack = ExitStack()
        self._session: ClientSession | None = None
        self._parameters: dict[str, Mapping[str, Any]] = {}
        self._row: Mapping[str, Any] = {}
        self._answer: str | None = None

    def splits(self) -> Sequence[str]:
        """Return the splits that have a file of tasks."""
        return tuple(self._tasks)

    def task_ids(self, split: str) -> Sequence[str]:
        """Return the ids of the rows; a row without one has its number."""
        return tuple(self._tasks[split])

    def profile(self, split: str, task_id: str) -> TaskProfile:
        """Return the instruction of a row, with its other fields as metadata."""
        row = self._tasks[split][task_id]
        question = next(field for field in _QUESTION_FIELDS if row.get(field))
        return TaskProfile(task_id, str(row[question]), metadata={k: v for k, v in row.items() if k not in _ID_FIELDS})

    def reset(self, split: str, task_id: str, seed: int) -> Observation:
        """Start the server or a session, and the task."""
        self.close()
        self._portal = self._stack.enter_context(start_blocking_portal())
        server = self._command[0] if self._command else self._url
        try:
            self._session = self._stack.enter_context(self._portal.wrap_async_context_manager(self._connected()))
            listed = self._portal.call(self._session.list_tools).tools
        except Exception as error:  # of the transport, in groups of exceptions
            cause: BaseException = error
            while isinstance(cause, BaseExceptionGroup):
                cause = cause.exceptions[0]
            raise EnvError(f"the MCP server {short_repr(server)} did not start: {describe_error(cause)}") from error
        self._parameters = {tool.name: tool.inputSchema for tool in listed}
        for key, tool in self._hidden.items():
            if tool is not None and tool not in self._parameters:
                raise EnvError(
                    f"{key} is {short_repr(tool)}, and the MCP server {short_repr(server)} has the tools "
                    f"{', '.join(self._parameters)}"
                )
        self.tools = [
            tool_schema(tool.name, tool.description or "", tool.inputSchema)
            for tool in listed
            if tool.name not in self._hidden.values()
        ]
        self._row, self._answer = {"seed": seed, **self._tasks[split][task_id]}, None
        reset_tool = self._hidden["reset_tool"]
        return Observation("" if reset_tool is None else _text_of(self._call_hidden(reset_tool)))

    def step(self, action: Action) -> StepResult:
        """Call a tool, or take the final answer."""
        if self._answer is not None:
            raise EnvError("the task has ended")
        call = action if isinstance(action, Mapping) else _parsed_call(action)
        if call is None:
            self._answer = str(action)
            return StepResult(Observation(""), is_done=True)
        name, arguments = call.get("name"), call.get("arguments", {})
        shown = [tool["function"]["name"] for tool in self.tools]
        if name not in shown:
            return _invalid(f"there is no tool {short_repr(name)}; the tools are {', '.join(shown)}")
        try:
            jsonschema.validate(arguments, self._parameters[str(name)])
        except jsonschema.ValidationError as error:
            return _invalid(f"the arguments of {name} are invalid: {shorten(error.message)}")
        result = self._call(str(name), arguments)
        return StepResult(Observation(_text_of(result)), info={"is_error": result.isError})

    def evaluate(self) -> Evaluation:
        """Return the score of `score_tool`.

        Raises:
            EnvError: there is no `score_tool`, or it returned no number.
        """
        tool = self._hidden["score_tool"]
        if tool is None:
            raise EnvError(f"the environment mcp/{self._name} has no score_tool; set it, or score with a task judge")
        result = self._call_hidden(tool)
        value: Any = (result.structuredContent or {}).get("result", _text_of(result))
        try:
            if result.isError or isinstance(value, bool):
                raise ValueError
            return Evaluation(float(value))
        except (TypeError, ValueError):
            raise EnvError(f"the tool {tool} returned {short_repr(value)}; expected a number, the score") from None

    def close(self) -> None:
        """End the session, and the server that it started."""
        self._stack.close()
        self._session = None

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[ClientSession]:
        """Start the server or connect to it, and return the session."""
        limit = timedelta(seconds=self._timeout)
        if self._command is not None:
            program, *arguments = self._command
            parameters = StdioServerParameters(command=program, args=arguments, env=self._env or None)
            async with stdio_client(parameters) as (read, write), ClientSession(read, write, limit) as session:
                await session.initialize()
                yield session
        else:
            assert self._url is not None
            async with (
                httpx.AsyncClient(headers=self._headers, timeout=self._timeout, trust_env=False) as client,
                streamable_http_client(self._url, http_client=client) as (read, write, _),
                ClientSession(read, write, limit) as session,
            ):
                await session.initialize()
                yield session

    def _call(self, tool: str, arguments: Mapping[str, Any]) -> CallToolResult:
        if self._session is None:
            raise EnvError("the task has not started; call reset first")
        try:
            result: CallToolResult = self._portal.call(self._session.call_tool, tool, dict(arguments))
        except McpError as error:
            raise EnvError(f"the call of the tool {tool} failed: {describe_error(error)}") from error
        return result

    def _call_hidden(self, tool: str) -> CallToolResult:
        """Call a tool with the fields of the task that it has parameters for."""
        known = {**self._row, "answer": self._answer or ""}
        accepted = self._parameters[tool].get("properties", {})
        return self._call(tool, {name: value for name, value in known.items() if name in accepted})


create = McpEnvironment


def _read_tasks(name: str, file: Path) -> dict[str, Mapping[str, Any]]:
    tasks: dict[str, Mapping[str, Any]] = {}
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise EnvError(f"the tasks of mcp/{name} cannot be read: {describe_error(error)}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise EnvError(f"{file}, line {number}: not JSON: {error}") from error
        if not isinstance(row, dict) or not any(row.get(field) for field in _QUESTION_FIELDS):
            raise EnvError(f"{file}, line {number}: expected an object with {', '.join(_QUESTION_FIELDS[:-1])} or "
                           f"{_QUESTION_FIELDS[-1]}")  # fmt: skip
        task_id = next((str(row[field]) for field in _ID_FIELDS if row.get(field) is not None), str(number))
        if task_id in tasks:
            raise EnvError(f"{file}, line {number}: another row has the id {short_repr(task_id)}; make the ids unique")
        tasks[task_id] = row
    return tasks


def _parsed_call(text: str) -> Mapping[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and isinstance(value.get("name"), str) else None


def _invalid(text: str) -> StepResult:
    return StepResult(Observation(text), is_valid=False)


def _text_of(result: CallToolResult) -> str:
    """Return the text of a result; other content is named by its type."""
    parts = (part.text if isinstance(part, TextContent) else f"[{part.type}]" for part in result.content)
    return "\n".join(parts)
