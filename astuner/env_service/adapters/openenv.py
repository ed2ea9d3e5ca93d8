"""Environments on OpenEnv servers (https://github.com/huggingface/openenv), over their HTTP and WebSocket protocol."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx
from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

from astuner.env_service.environment import Environment, tool_schema
from astuner.errors import EnvError, short_repr, shorten
from astuner.schema import Action, Evaluation, Observation, StepResult, TaskProfile

_TIMEOUT = 30.0
_VALIDATION_SEEDS = 1_000_000_000
"""The first seed of the validation split, on servers that list no tasks."""


class OpenEnvEnvironment(Environment):
    """An environment on an OpenEnv server. Each instance is a session of the server.

    A text becomes the server action's field `action_field`; a JSON object is the action itself; a tool call calls a
    tool of an MCP environment. The score is the sum of the rewards.

    Args:
        name: the server's name for the environment.
        url: address of the server.
        instruction: what the agent has to do; the server's description by default.
        action_field: the field of the action that contains the agent's text; by default, the only required string.
        observation_field: the field of the observation that the agent sees; by default, the only string, or all
            fields as JSON.
        token: sent as a bearer token.
        tasks: each split's number of seeds, for servers that list no tasks.
        reset: further arguments of the server's `reset`.
        timeout: seconds that a step may take.

    Raises:
        EnvError: the server does not answer, or the action's field is not known.
    """

    def __init__(
        self,
        name: str,
        url: str,
        instruction: str | None = None,
        action_field: str | None = None,
        observation_field: str | None = None,
        token: str | None = None,
        tasks: Mapping[str, int] | None = None,
        reset: Mapping[str, Any] | None = None,
        timeout: float = 300.0,
    ) -> None:
        if urlsplit(url).scheme not in ("http", "https"):
            raise EnvError(f"url must be the address of an OpenEnv server (http://HOST:PORT), got {short_repr(url)}")
        self._name, self._url, self._timeout = name, url.rstrip("/"), timeout
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._seeds = dict(tasks or {"train": 1000, "validation": 100})
        self._reset = dict(reset or {})
        self._observation_field = observation_field
        self._splits: list[str] | None = None
        self._instruction = instruction
        schema = self._request("GET", "/schema")
        self._properties: Mapping[str, Any] = (schema or {}).get("action", {}).get("properties", {})
        self._action_field = action_field or _text_field((schema or {}).get("action", {}))
        if action_field is not None and self._properties and action_field not in self._properties:
            raise EnvError(
                f"the actions of {name} have no field {short_repr(action_field)}; "
                f"they have {', '.join(self._properties)}"
            )
        self._session = contextlib.ExitStack()
        self._socket: Any = None
        self._score = 0.0
        self._is_done = False

    def splits(self) -> Sequence[str]:
        """Return the server's splits, or the keys of `tasks` if the server has none."""
        if self._splits is None:
            answer = self._request("GET", f"/{self._name}/splits")
            self._splits = [str(split["name"]) for split in answer] if isinstance(answer, list) else []
        return self._splits or list(self._seeds)

    def task_ids(self, split: str) -> Sequence[str]:
        """Return the server's tasks by index, or seeds."""
        self.splits()
        if self._splits:
            count = (self._request("POST", f"/{self._name}/num_tasks", {"split": split}) or {}).get("num_tasks", 0)
            return [str(index) for index in range(count)]
        first = _VALIDATION_SEEDS * list(self._seeds).index(split)
        return [str(first + number) for number in range(self._seeds[split])]

    def profile(self, split: str, task_id: str) -> TaskProfile:
        """Return the instruction, and the server's description of the task."""
        self.splits()
        task: Any = None
        if self._splits:
            task = (self._request("POST", f"/{self._name}/task", {"split": split, "index": int(task_id)}) or {})["task"]
        if self._instruction is None:
            self._instruction = str((self._request("GET", "/metadata") or {}).get("description") or self._name)
        return TaskProfile(task_id, self._instruction, metadata={} if task is None else {"task": task})

    def reset(self, split: str, task_id: str, seed: int) -> Observation:
        """Open a session, and start the task."""
        self.splits()
        task = {"split": split, "index": int(task_id), "seed": seed} if self._splits else {"seed": int(task_id)}
        try:
            self._socket = self._session.enter_context(
                connect(
                    f"ws{self._url.removeprefix('http')}/ws",
                    additional_headers=self._headers,
                    open_timeout=_TIMEOUT,
                    max_size=None,
                    proxy=None,
                )
            )
        except (OSError, WebSocketException) as error:
            raise EnvError(f"the OpenEnv server at {self._url} opened no session: {error}") from error
        self._score, self._is_done = 0.0, False
        self.tools = self._list_tools()
        return self._observed(self._ask("reset", {**self._reset, **task})).observation

    def step(self, action: Action) -> StepResult:
        """Perform an action. One that does not fit the server's schema of actions is not performed."""
        if self._is_done:
            raise EnvError("the task has ended; it accepts no further action")
        fields = self._fields(action)
        if isinstance(fields, str):
            return StepResult(Observation(fields), is_valid=False)
        answer = self._ask("step", fields)
        if answer.get("code") == "VALIDATION_ERROR":
            return StepResult(Observation(f"Invalid action: {shorten(str(answer))}"), is_valid=False)
        return self._observed(answer)

    def evaluate(self) -> Evaluation:
        """Return the sum of the rewards."""
        return Evaluation(self._score, details={"is_done": self._is_done})

    def close(self) -> None:
        """End the session."""
        self._socket = None
        self._session.close()

    def _fields(self, action: Action) -> dict[str, Any] | str:
        """Return the server's form of an action; a message if it has none."""
        if isinstance(action, Mapping):
            if self.tools and "name" in action:
                return {
                    "type": "call_tool",
                    "tool_name": str(action["name"]),
                    "arguments": dict(action.get("arguments") or {}),
                }
            return dict(action)
        if self._action_field is not None:
            return {self._action_field: action}
        try:
            value = json.loads(action)
        except ValueError:
            value = None
        if isinstance(value, dict):
            return value
        return f"Invalid action: expected a JSON object with the fields {', '.join(self._properties)}."

    def _observed(self, answer: Mapping[str, Any]) -> StepResult:
        if "code" in answer:
            raise EnvError(f"the OpenEnv server at {self._url} failed: {shorten(str(answer.get('message', answer)))}")
        reward = float(answer.get("reward") or 0.0)
        self._score += reward
        self._is_done = bool(answer.get("done"))
        values = {name: value for name, value in (answer.get("observation") or {}).items() if name != "metadata"}
        return StepResult(
            Observation(_text(values, self._observation_field)),
            reward,
            self._is_done,
            info=dict(answer.get("metadata") or {}),
        )

    def _list_tools(self) -> Sequence[Mapping[str, Any]]:
        """Return the tools of an MCP environment."""
        if not {"tool_name", "arguments"} <= self._properties.keys() and self._properties.keys() > {"metadata"}:
            return ()
        answer = self._ask("mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}})
        tools = (answer.get("result") or {}).get("tools", [])
        return [
            tool_schema(
                tool["name"],
                tool.get("description") or "",
                tool.get("inputSchema") or tool.get("input_schema") or {"type": "object"},
            )
            for tool in tools
        ]

    def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message in the session, and return the answer's data; an error has the key `code`."""
        if self._socket is None:
            raise EnvError("the instance has no session: it was not reset, or is closed")
        try:
            self._socket.send(json.dumps({"type": kind, "data": data}))
            answer: dict[str, Any] = json.loads(self._socket.recv(timeout=self._timeout))["data"]
        except TimeoutError as error:
            raise EnvError(f"the OpenEnv server at {self._url} did not answer within {self._timeout:g} s") from error
        except (OSError, WebSocketException, ValueError, KeyError) as error:
            raise EnvError(f"the OpenEnv server at {self._url} ended the session: {error}") from error
        return answer

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Return the answer to an HTTP request; None if the server does not have the path."""
        try:
            response = httpx.request(
                method, self._url + path, json=body, headers=self._headers, timeout=_TIMEOUT, trust_env=False
            )
        except httpx.HTTPError as error:
            raise EnvError(f"no OpenEnv server answers at {self._url}: {error}. Start it, or correct `url`") from error
        if response.status_code in (404, 405, 501):
            return None
        if response.is_error:
            raise EnvError(f"{method} {self._url}{path}: {response.status_code} {shorten(response.text)}")
        return response.json()


create = OpenEnvEnvironment


def _text_field(schema: Mapping[str, Any]) -> str | None:
    """Return the only required string field of an action; None if there is no such field, or more than one."""
    properties: Mapping[str, Any] = schema.get("properties", {})
    strings = [field for field in schema.get("required", ()) if properties.get(field, {}).get("type") == "string"]
    return strings[0] if len(strings) == 1 and "tool_name" not in strings else None


def _text(values: Mapping[str, Any], field: str | None) -> str:
    """Return an observation's text, or that of one field."""
    if field is not None:
        if field not in values:
            raise EnvError(f"the observation has no field {short_repr(field)}; its fields are {', '.join(values)}")
        return values[field] if isinstance(values[field], str) else json.dumps(values[field])
    texts = [value for value in values.values() if isinstance(value, str)]
    return texts[0] if len(texts) == len(values) == 1 else json.dumps(values)
