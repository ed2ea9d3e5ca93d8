"""Environments on a real OpenEnv server: `python openenv_server.py NAME PORT` in an environment with `openenv`."""

from __future__ import annotations

import random
import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, EnvironmentMetadata, Observation, State
from pydantic import Field


class Said(Action):
    message: str = Field(description="a number")


class Moved(Action):
    row: int
    column: int


class Seen(Observation):
    text: str


class Board(Observation):
    cells: list[int]
    label: str


class Guess(Environment[Said, Seen, State]):  # the number is that of the seed
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Seen:
        self.number = random.Random(seed).randint(1, options.get("highest", 9))
        return Seen(text=f"guess a number up to {options.get('highest', 9)}")

    def step(self, action: Said, **_: Any) -> Seen:
        guess = int(action.message)
        is_right = guess == self.number
        return Seen(text="right" if is_right else "wrong", reward=float(is_right), done=is_right)

    @property
    def state(self) -> State:
        return State()

    def get_metadata(self) -> EnvironmentMetadata:
        return EnvironmentMetadata(name="guess", description="Guess the number.", version="1")


class Tasks(Guess):  # with a list of tasks
    def list_splits(self) -> list[str]:
        return ["train", "test"]

    def list_tasks(self, split: str) -> list[Any]:
        return [{"number": number} for number in range(self.num_tasks(split))]

    def num_tasks(self, split: str) -> int:
        return {"train": 5, "test": 2}[split]

    def get_task(self, split: str, index: int) -> Any:
        return {"id": f"{split}-{index}", "index": index}

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Seen:
        self.number = options["index"]
        return Seen(text=f"task {options['index']} of {options['split']}")


class Grid(Environment[Moved, Board, State]):  # the action has several fields
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Board:
        return Board(cells=[0, 0], label="empty")

    def step(self, action: Moved, **_: Any) -> Board:
        return Board(cells=[action.row, action.column], label="moved", reward=0.5)

    @property
    def state(self) -> State:
        return State()


ENVIRONMENTS: dict[str, Any] = {
    "guess": (Guess, Said, Seen),
    "tasks": (Tasks, Said, Seen),
    "grid": (Grid, Moved, Board),
}


def tools() -> Any:
    from fastmcp import FastMCP
    from openenv.core.env_server.mcp_environment import MCPEnvironment
    from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation

    class Calculator(MCPEnvironment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            server = FastMCP("calculator")

            @server.tool
            def add(a: int, b: int) -> int:
                """Add two numbers."""
                return a + b

            super().__init__(server)

        def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Observation:
            return Observation(done=False, metadata={"status": "ready"})

        def _step_impl(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
            return Observation(done=False, metadata={"error": "unknown action"})

        @property
        def state(self) -> State:
            return State()

    return Calculator, CallToolAction, CallToolObservation


if __name__ == "__main__":
    name, port = sys.argv[1:]
    kind, action, observation = tools() if name == "tools" else ENVIRONMENTS[name]
    app = create_app(kind, action, observation, env_name=name, max_concurrent_envs=4)
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")
