"""Workloads of the merge and update benchmarks.

A workload is a list of calls, each `{"agent", "prompt_ids", "completion_ids"}`. The calls of a group have a fourth key,
`"episode"`, because they belong to several episodes.
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
    """Generates the calls of one agent: a prompt, followed by turns of an answer and an observation."""

    def __init__(self, name: str, rng: random.Random, prompt: int = 300, turn: int = 50) -> None:
        self.name = name
        self.rng = rng
        self.turn = turn
        self.context = self.ids(prompt)
        self.prompt = list(self.context)

    def ids(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCABULARY) for _ in range(count)]

    def call(self, *, extend: bool = True) -> dict[str, Any]:
        """Return the next call. With `extend`, append its answer and an observation to the context."""
        call = {"agent": self.name, "prompt_ids": list(self.context), "completion_ids": self.ids(self.turn)}
        if extend:
            self.context += call["completion_ids"] + self.ids(self.turn)
        return call

    def summarise(self) -> None:
        """Replace the history by a summary."""
        self.context = self.prompt + self.ids(2 * self.turn)

    def drift(self) -> None:
        """Change one token of the history, as an agent framework might."""
        position = self.rng.randrange(len(self.prompt), len(self.context))
        self.context[position] = (self.context[position] + 1) % VOCABULARY


def linear(calls: int = 30) -> Workload:
    agent = Agent("a", random.Random(0))
    return [agent.call() for _ in range(calls)]


def three_agents(calls: int = 20) -> Workload:
    agents = [Agent(name, random.Random(name)) for name in "abc"]
    return [agent.call() for _ in range(calls) for agent in agents]


def retry(calls: int = 20) -> Workload:
    agent = Agent("a", random.Random(0))
    workload = []
    for number in range(calls):
        if number % 5 == 4:
            workload.append(agent.call(extend=False))
        workload.append(agent.call())
    return workload


def summary(calls: int = 20) -> Workload:
    agent = Agent("a", random.Random(0))
    workload = []
    for number in range(calls):
        if number and number % 10 == 0:
            agent.summarise()
        workload.append(agent.call())
    return workload


def drift(calls: int = 20) -> Workload:
    agent = Agent("a", random.Random(0))
    workload = []
    for number in range(calls):
        if number % 10 == 9:
            agent.drift()
        workload.append(agent.call())
    return workload


def group(episodes: int = 8, prompt: int = 1000, answer: int = 200) -> Workload:
    shared = Agent("a", random.Random(0), prompt, answer)
    return [shared.call(extend=False) | {"episode": f"e{number}"} for number in range(episodes)]


def forked(calls: int) -> Workload:
    """Return calls that each start from the beginning or the end of an earlier call, at most three turns deep."""
    rng = random.Random(0)
    root = Agent("a", rng, 1000)
    workload: Workload = []
    depths: list[int] = []
    for _ in range(calls):
        base = rng.randrange(len(workload)) if workload else None
        agent = copy(root)
        if base is not None and depths[base] < 3:
            agent.context = workload[base]["prompt_ids"] + workload[base]["completion_ids"] + root.ids(root.turn)
        depths.append(depths[base] + 1 if agent.context is not root.context and base is not None else 1)
        workload.append(agent.call(extend=False))
    return workload


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
    """Read a workload from a JSON file. Exit with a message if the file is not a workload."""
    expected = 'a JSON list of calls, each {"agent": text, "prompt_ids": [ids], "completion_ids": [ids]}'
    try:
        workload: Any = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        sys.exit(f"{path} cannot be read: {error}; expected {expected}")
    if not isinstance(workload, list) or not workload:
        sys.exit(f"{path} contains {str(workload)[:60]}; expected {expected}")
    for number, call in enumerate(workload):
        lists = [call.get(name) for name in ("prompt_ids", "completion_ids")] if isinstance(call, dict) else [None]
        if not all(isinstance(ids, list) and all(type(item) is int and item >= 0 for item in ids) for ids in lists):
            sys.exit(f"{path}: call {number} is {str(call)[:60]}; expected {expected}")
    return workload


def calls_of(workload: Iterable[dict[str, Any]]) -> dict[str, list[LlmCall]]:
    """Return the calls of a workload, grouped by episode id."""
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
