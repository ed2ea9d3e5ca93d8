"""Environments for the tests of the service."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from astuner.env_service import Environment
from astuner.schema import Action, Evaluation, Observation, Reference, StepResult, TaskProfile

_SPLITS = {"train": range(20), "validation": range(100, 105)}


class GuessNumber(Environment):
    """The agent guesses a number, and learns whether it is larger or smaller."""

    tools: Sequence[Mapping[str, Any]] = (
        {
            "type": "function",
            "function": {
                "name": "guess",
                "description": "Guess the number.",
                "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}},
            },
        },
    )

    def __init__(self, high: int = 20, max_steps: int = 8) -> None:
        self._high = high
        self._max_steps = max_steps
        self._steps = 0
        self._is_solved = False

    def task_ids(self, split: str) -> Sequence[str]:
        return [f"number-{number}" for number in _SPLITS[split]]

    def profile(self, split: str, task_id: str) -> TaskProfile:
        return TaskProfile(
            task_id=task_id,
            main_query=f"Guess a number from 1 to {self._high}. Answer in the form of {self.action_preference}.",
            metadata={"high": self._high},
            reference=Reference(actions=(str(self._number(task_id)),)),
            max_steps=self._max_steps,
        )

    def reset(self, split: str, task_id: str, seed: int) -> Observation:
        self._target = self._number(task_id)
        return Observation(f"Game {seed} begins.", legal_actions=tuple(map(str, range(1, self._high + 1))))

    def step(self, action: Action) -> StepResult:
        self._steps += 1
        is_last = self._steps == self._max_steps
        text = action if isinstance(action, str) else str(action["arguments"]["number"])
        if not text.strip().isdecimal():
            return StepResult(Observation("This is not a number."), is_done=is_last, is_valid=False)
        number = int(text)
        self._is_solved = number == self._target
        if self._is_solved:
            return StepResult(Observation("Correct."), reward=1.0, is_done=True)
        hint = "larger" if number < self._target else "smaller"
        return StepResult(Observation(f"The number is {hint}."), is_done=is_last, info={"step": self._steps})

    def evaluate(self) -> Evaluation:
        return Evaluation(1.0 if self._is_solved else 0.0, is_success=self._is_solved)

    def _number(self, task_id: str) -> int:
        return random.Random(task_id).randint(1, self._high)


class AsyncGuessNumber(GuessNumber):
    """The same with `async` methods, in one process for all instances. The action `sleep` takes an hour."""

    is_async = True

    async def reset(self, split: str, task_id: str, seed: int) -> Observation:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().reset(split, task_id, seed)

    async def step(self, action: Action) -> StepResult:  # type: ignore[override]
        await asyncio.sleep(3600 if action == "sleep" else 0)
        if action == "block":
            time.sleep(3600)
        if action == "pid":
            return StepResult(Observation(str(os.getpid())))
        return super().step(action)


class Faulty(GuessNumber):
    """Each action, or the parameter `fault` for the other methods, is a fault."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        if fault == "init":
            raise ValueError("no such mode")
        self._fault = fault

    def profile(self, split: str, task_id: str) -> TaskProfile:
        if self._fault == "profile":
            raise KeyError("no profile")
        return super().profile(split, task_id)

    def reset(self, split: str, task_id: str, seed: int) -> Observation:
        if self._fault == "reset":
            raise RuntimeError("the board is missing")
        if self._fault == "hang":
            time.sleep(3600)
        return super().reset(split, task_id, seed)

    def step(self, action: Action) -> Any:
        match action:
            case "raise":
                raise RuntimeError("the dice are lost")
            case "system exit":
                raise SystemExit(3)
            case "exit":
                os._exit(7)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                time.sleep(3600)
            case "nan":
                return StepResult(Observation("x"), reward=float("nan"))
            case "nan by agent":
                return StepResult(Observation("x"), reward={"white": 1.0, "black": float("inf")})
            case "large":
                return StepResult(Observation("x" * 10 * 2**20))
            case "large info":
                return StepResult(Observation("x"), info={"log": "x" * 10 * 2**20})
            case "none":
                return None
            case "tuple":
                return Observation("x"), 1.0, False
            case "no text":
                return StepResult(Observation(5))  # type: ignore[arg-type]
            case "surrogate":
                return StepResult(Observation("\ud800"))
            case "object in info":
                return StepResult(Observation("x"), info={"object": object(), "set": {1}, "numpy": _numpy()})
            case "child" | "child with a session":
                sleep = [sys.executable, "-c", "import time; time.sleep(3600)"]
                child = subprocess.Popen(sleep, start_new_session=action != "child")
                return StepResult(Observation(str(child.pid)))
            case "slow":
                time.sleep(0.3)
        return super().step(action)

    def evaluate(self) -> Evaluation:
        if self._fault == "evaluate":
            raise RuntimeError("the score is lost")
        if self._fault == "nan score":
            return Evaluation(float("nan"))
        if self._fault == "no score":
            return Evaluation({})
        return super().evaluate()

    def close(self) -> None:
        if self._fault == "close":
            raise RuntimeError("it cannot be closed")
        if self._fault == "hang in close":
            time.sleep(3600)


class TwoSeats(GuessNumber):
    """Two agents, with rewards and scores by name."""

    def step(self, action: Action) -> StepResult:
        return StepResult(Observation("x", agent="black"), reward={"white": 1.0, "black": -1}, is_done=True)

    def evaluate(self) -> Evaluation:
        return Evaluation({"white": 1.0, "black": -1.0})


def _numpy() -> Any:
    import numpy

    return numpy.float32(0.5)
