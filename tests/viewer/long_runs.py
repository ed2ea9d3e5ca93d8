"""A run with many episodes, and an episode with many tokens."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path

from astuner.context_tracker.merge import build_samples
from astuner.schema import Episode, LlmCall, Task
from tests.viewer.records import open_record


def index_row(number: int) -> dict[str, object]:
    fails = number % 50 == 0
    return {
        "step": number // 512, "split": "train", "task_id": f"task/{number // 8 % 1000}",
        "episode_id": f"e-{number:06d}",
        "repeat_index": number % 8, "status": "failed" if fails else "ok",
        "reward": None if fails else number % 11 / 10,
        "is_success": None if fails else number % 11 > 5, "advantage": 0.1, "calls": 3, "samples": 1 + number % 2,
        "dropped_samples": 0, "tokens_raw": 3000 + number % 700, "tokens_distinct": 1500, "tokens_trained": 400,
        "seconds": 2.5, "error_kind": "timeout" if fails else None, "path": f"episodes/train/{number}.json",
        "forks": {"truncated": 1} if number % 10 == 0 else {}, "agents": [f"agent-{number % 3}"], "tags": ["default"],
        "finish_reasons": ["length" if number % 7 == 0 else "stop"],
    }  # fmt: skip


def many_episodes(folder: Path, episodes: int, *, texts: bool = False) -> Path:
    """Write the record of a run with many episodes.

    Args:
        folder: The run's folder.
        episodes: Number of episodes.
        texts: Whether to write the files of the episodes; without them, the run has an index only.
    """
    with open_record(folder) as record:
        rows = (json.dumps(index_row(number)) + "\n" for number in range(episodes))
        (record.folder / "episodes/index.jsonl").write_text("".join(rows))
        if texts:
            (record.folder / "episodes/train").mkdir()
            words = random.Random(0).choices(_WORDS, k=200_000)
            for number in range(episodes):
                content = json.dumps(_episode_document(number, words))
                (record.folder / f"episodes/train/{number}.json").write_text(content)
    return folder


_WORDS = ["".join(letters) for letters in itertools.product("bdfgklmnprst", "aeiou", "bdfgklmnprst", "aeiou")]


def _episode_document(number: int, words: Sequence[str]) -> dict[str, object]:
    """Return the file of an episode with a shared system prompt, a task of 8 episodes, and an answer of 100 words."""
    task = number // 8 % 1000
    messages = [
        {"role": "system", "content": " ".join(words[:80])},
        {"role": "user", "content": f"Task {task}: " + " ".join(words[task : task + 40])},
        {"role": "assistant", "content": " ".join(words[number : number + 100]) + f" The answer is {number}."},
    ]
    call = {
        "messages": messages, "prompt_ids": list(range(1000, 1400)), "completion_ids": list(range(200)),
        "logprobs": [-0.123456] * 200,
    }  # fmt: skip
    return {"format": 1, "episode": {"task": {"main_query": "?"}, "calls": [call], "metadata": {}}}


def many_tokens(folder: Path, tokens: int, vocabulary: int, model: str = "some/model") -> str:
    """Write a run with an episode of 20 calls that extend each other and a fork, and return its id."""
    turn = tokens // 20
    prompt: tuple[int, ...] = ()
    calls = []
    for number in range(20):
        prompt += tuple((number * 31 + place * 7) % vocabulary for place in range(turn // 2))
        completion = tuple((number * 17 + place * 3) % vocabulary for place in range(turn - turn // 2))
        calls.append(LlmCall(f"c{number}", "long", prompt, completion, tuple(-0.1 for _ in completion), "stop"))
        prompt += completion
    calls.append(LlmCall("fork", "long", (*prompt[:turn], 1, 2, 3), (4, 5), (-0.1, -0.2), "stop"))
    samples = tuple(build_samples(calls))
    episode = Episode("long", Task("long", "?"), 0, "ok", 1.0, True, tuple(calls), samples)
    with open_record(folder, model) as record:
        record.write_episode(1, "train", episode, 0.5)
    return episode.episode_id
