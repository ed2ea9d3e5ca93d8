"""Calls of agents, as the benchmarks of merging and updating take them.

A workload is a list of calls, each `{"agent", "prompt_ids", "completion_ids"}`; those of a group are several episodes,
told apart by `"episode"`.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterable
from copy import copy
from pathlib import Path
from typing import Any

from astuner.schema import LlmCall

VOCABULARY = 2000
Workload = list[dict[str, Any]]


class Agent:
    """Makes the calls of one agent: a prompt, then turns of an answer and an observation."""

    def __init__(self, name: str, rng: random.Random, prompt: int = 300, turn: int = 50) -> None:
        self.name = name
        self.rng = rng
        self.turn = turn
        self.context = self.ids(prompt)
        self.prompt = list(self.context)

    def ids(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCABULARY) for _ in range(count)]

    def call(self, *, goes_on: bool = True) -> dict[str, Any]:
        """Answer; the answer and an observation join the context if the agent goes on from it."""
        call = {"agent": self.name, "prompt_ids": list(self.context), "completion_ids": self.ids(self.turn)}
        if goes_on:
            self.context += call["completion_ids"] + self.ids(self.turn)
        return call

    def summarise(self) -> None:
        """Put a summary in the place of the history."""
        self.context = self.prompt + self.ids(2 * self.turn)

    def drift(self) -> None:
        """Let the framework change one token of the history."""
        place = self.rng.randrange(len(self.prompt), len(self.context))
        self.context[place] = (self.context[place] + 1) % VOCABULARY


def linear(calls: int = 30) -> Workload:
    agent = Agent("a", random.Random(0))
    return [agent.call() for _ in range(calls)]


def three_agents(calls: int = 20) -> Workload:
    agents = [Agent(name, random.Random(name)) for name in "abc"]
    return [agent.call() for _ in range(calls) for agent in agents]


def retry(calls: int = 20) -> Workload:
    agent = Agent("a", random.Random(0))
    made = []
    for number in range(calls):
        if number % 5 == 4:
            made.append(agent.call(goes_on=False))
        made.append(agent.call())
    return made


def summary(calls: int = 20) -> Workload:
    agent = Agent("a", random.Random(0))
    made = []
    for number in range(calls):
        if number and number % 10 == 0:
            agent.summarise()
        made.append(agent.call())
    return made


def drift(calls: int = 20) -> Workload:
    agent = Agent("a", random.Random(0))
    made = []
    for number in range(calls):
        if number % 10 == 9:
            agent.drift()
        made.append(agent.call())
    return made


def group(episodes: int = 8, prompt: int = 1000, answer: int = 200) -> Workload:
    shared = Agent("a", random.Random(0), prompt, answer)
    return [shared.call(goes_on=False) | {"episode": f"e{number}"} for number in range(episodes)]


def forked(calls: int) -> Workload:
    """Calls that each go on from where an earlier one began or ended, three turns deep at most."""
    rng = random.Random(0)
    root = Agent("a", rng, 1000)
    made: Workload = []
    depths: list[int] = []
    for _ in range(calls):
        base = rng.randrange(len(made)) if made else None
        agent = copy(root)
        if base is not None and depths[base] < 3:
            agent.context = made[base]["prompt_ids"] + made[base]["completion_ids"] + root.ids(root.turn)
        depths.append(depths[base] + 1 if agent.context is not root.context and base is not None else 1)
        made.append(agent.call(goes_on=False))
    return made


BUILT_IN: dict[str, Callable[[], Workload]] = {
    "linear": linear,
    "three_agents": three_agents,
    "retry": retry,
    "summary": summary,
    "drift": drift,
    "group": group,
    "forked_800": lambda: forked(800),
    "forked_1600": lambda: forked(1600),
}


def load(path: Path) -> Workload:
    """Read a workload from a JSON file; end the program where it is none."""
    expected = 'a JSON list of calls, each {"agent": text, "prompt_ids": [ids], "completion_ids": [ids]}'
    try:
        workload: Any = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        sys.exit(f"{path} cannot be read: {error}; expected {expected}")
    if not isinstance(workload, list) or not workload:
        sys.exit(f"{path} holds {str(workload)[:60]}; expected {expected}")
    for number, call in enumerate(workload):
        lists = [call.get(name) for name in ("prompt_ids", "completion_ids")] if isinstance(call, dict) else [None]
        if not all(isinstance(ids, list) and all(type(item) is int and item >= 0 for item in ids) for ids in lists):
            sys.exit(f"{path}: call {number} is {str(call)[:60]}; expected {expected}")
    return workload


def calls_of(workload: Iterable[dict[str, Any]]) -> dict[str, list[LlmCall]]:
    """Return the calls by episode."""
    episodes: dict[str, list[LlmCall]] = {}
    for number, row in enumerate(workload):
        episode = str(row.get("episode", "e"))
        completion = tuple(row["completion_ids"])
        call = LlmCall(
            call_id=f"{episode}/{number}",
            episode_id=episode,
            prompt_ids=tuple(row["prompt_ids"]),
            completion_ids=completion,
            logprobs=(-1.0,) * len(completion),
            finish_reason="stop",
            agent_name=row.get("agent", ""),
        )
        episodes.setdefault(episode, []).append(call)
    return episodes
